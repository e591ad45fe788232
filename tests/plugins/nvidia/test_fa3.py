from __future__ import annotations

from dataclasses import replace

from attnmux.core.choosing.platform import Platform
from attnmux.core.testing import AttentionBackendTests, Candidate
from attnmux.nvidia.cards.fa3 import FA3
from attnmux.nvidia.emulators import sgl_flash_attn
from attnmux.nvidia.fa3 import FA3Backend, Kernels

EMULATED = Kernels(
    flash_attn_with_kvcache=sgl_flash_attn.flash_attn_with_kvcache,
    flash_attn_varlen_func=sgl_flash_attn.flash_attn_varlen_func,
)

CANDIDATE = Candidate(
    card=replace(FA3, requires=()),
    platform=Platform.parse("nvidia:sm90,cuda=13.0"),
    device="cpu",
    factory=lambda context, options: FA3Backend(context, options, EMULATED),
)


class TestFA3Emulated(AttentionBackendTests):
    backend = CANDIDATE
