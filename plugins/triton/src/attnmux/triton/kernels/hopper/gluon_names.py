"""Functions of Gluon whose names differ between the releases of Triton that are served, and one
of Triton that other packages replace."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy

from attnmux.triton.launches import shapes

try:
    barrier = gl.barrier
except AttributeError:  # before Triton 3.7
    barrier = gl.thread_barrier

try:
    copy_to_shared = async_copy.async_load
except AttributeError:  # before Triton 3.8
    copy_to_shared = async_copy.async_copy_global_to_shared

next_power_of_2 = gluon.constexpr_function(shapes.next_power_of_2)
"""Not Triton's: SGLang puts a function in its place that no kernel can call."""
