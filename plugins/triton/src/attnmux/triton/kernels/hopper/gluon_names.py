"""Functions of Gluon whose names differ between the releases of Triton that are served, and one
of Triton that other packages replace."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy

try:
    barrier = gl.barrier
except AttributeError:  # before Triton 3.7
    barrier = gl.thread_barrier

try:
    copy_to_shared = async_copy.async_load
except AttributeError:  # before Triton 3.8
    copy_to_shared = async_copy.async_copy_global_to_shared


@gluon.constexpr_function
def next_power_of_2(number):  # type: ignore[no-untyped-def]  # a kernel's
    """SGLang puts a function that no kernel can call in the place of Triton's."""
    return 1 << max(number - 1, 0).bit_length()
