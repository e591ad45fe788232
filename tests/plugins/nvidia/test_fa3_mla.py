from __future__ import annotations

from dataclasses import replace

from attnmux.core.choosing.platform import Platform
from attnmux.core.testing import AttentionBackendTests, Candidate
from attnmux.nvidia.cards.fa3_mla import FA3_MLA
from attnmux.nvidia.emulators import sgl_flash_attn
from attnmux.nvidia.fa3_mla import FA3MLABackend, Kernels

EMULATED = Kernels(
    flash_attn_with_kvcache=sgl_flash_attn.flash_attn_with_kvcache,
    flash_attn_varlen_func=sgl_flash_attn.flash_attn_varlen_func,
    merge_state_v2=sgl_flash_attn.merge_state_v2,
)

CANDIDATE = Candidate(
    card=replace(FA3_MLA, status="available", requires=()),
    platform=Platform.parse("nvidia:sm90,cuda=13.0"),
    device="cpu",
    factory=lambda context, options: FA3MLABackend(context, options, EMULATED),
)


class TestFA3MLAEmulated(AttentionBackendTests):
    backend = CANDIDATE
