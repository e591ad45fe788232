from __future__ import annotations

from dataclasses import replace

import pytest

from attnmux.core.choosing.platform import Platform
from attnmux.core.testing import AttentionBackendTests, Candidate
from attnmux.triton.cards.triton import TRITON

pytest.importorskip("triton")

from attnmux.triton.backend import TritonBackend  # where there is a Triton

CANDIDATE = Candidate(
    card=replace(TRITON, requires=(), status="available", factory="attnmux.triton.factory:triton"),
    platform=Platform.parse("nvidia:sm90,cuda=13.0"),
    device="cpu",
    # So few programs that requests are split and programs take several.
    factory=lambda context, options: TritonBackend(context, options, compute_units=3),
)


class TestTritonInterpreted(AttentionBackendTests):
    backend = CANDIDATE
    page_sizes = (1, 16)  # to the kernels a page is a list of slots
