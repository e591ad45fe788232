"""FlashInferMLABackend on the emulator of the library."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from attnmux.core.choosing.platform import Platform
from attnmux.core.testing import AttentionBackendTests, Candidate
from attnmux.nvidia.cards.flashinfer_mla import FLASHINFER_MLA
from attnmux.nvidia.emulators import flashinfer as emulator
from attnmux.nvidia.flashinfer_mla.backend import FlashInferMLABackend
from attnmux.nvidia.flashinfer_mla.kernels import Kernels

EMULATED = Kernels(paged=emulator.BatchMLAPagedAttentionWrapper)

CANDIDATE = Candidate(
    card=replace(FLASHINFER_MLA, status="available", requires=()),
    platform=Platform.parse("nvidia:sm90,cuda=13.0"),
    device="cpu",
    factory=lambda context, options: FlashInferMLABackend(context, options, EMULATED),
)


class TestFlashInferMLAEmulated(AttentionBackendTests):
    backend = CANDIDATE
