"""Launches that begin before the previous one ends (programmatic dependent launch of CUDA)."""

from __future__ import annotations

import triton
import triton.language as tl

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # a Triton without NVIDIA's backend, whose launches do not overlap

    @triton.jit
    def gdc_wait():
        """Nothing to wait for."""

    @triton.jit
    def gdc_launch_dependents():
        """Nothing to let begin."""


@triton.jit
def await_previous(OVERLAPS: tl.constexpr):
    """Wait until the previous launch's results are visible, and let the next launch begin, which
    waits for this one's. Call it before the first load of a launch's results."""
    if OVERLAPS:
        gdc_wait()
        gdc_launch_dependents()
