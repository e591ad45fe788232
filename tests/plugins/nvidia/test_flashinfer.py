"""FlashInferBackend on the emulator of the library."""

from __future__ import annotations

from dataclasses import replace

from attnmux.core.choosing.platform import Platform
from attnmux.core.testing import AttentionBackendTests, Candidate
from attnmux.nvidia.cards.flashinfer import FLASHINFER
from attnmux.nvidia.emulators import flashinfer as emulator
from attnmux.nvidia.flashinfer.backend import FlashInferBackend
from attnmux.nvidia.flashinfer.kernels import Kernels

EMULATED = Kernels(
    decode=emulator.BatchDecodeWithPagedKVCacheWrapper,
    paged=emulator.BatchPrefillWithPagedKVCacheWrapper,
    ragged=emulator.BatchPrefillWithRaggedKVCacheWrapper,
    merge_state=emulator.merge_state,
    fast_decode_plan=emulator.fast_decode_plan,
)

CANDIDATE = Candidate(
    card=replace(FLASHINFER, requires=()),
    platform=Platform.parse("nvidia:sm90,cuda=13.0"),
    device="cpu",
    factory=lambda context, options: FlashInferBackend(context, options, EMULATED),
)


class TestFlashInferEmulated(AttentionBackendTests):
    backend = CANDIDATE
