"""Linear layers on CPUs whose torch has no fast products of narrow values."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from attnmux.core import InvalidInput
from attnmux.cpu.levels import AVX2, AVX512, serving, shipped
from attnmux.cpu.native.library import TYPES, Linear, load_linear

if TYPE_CHECKING:
    from attnmux.core import BackendContext

NARROW_ROWS = range(1, 1 << 31)
WIDE_ROWS = range(2, 17)
"""torch is as fast with others. See benchmarks/results/native-cpu.md."""
ROWS = {
    torch.bfloat16: NARROW_ROWS,
    torch.float16: NARROW_ROWS,
    torch.float32: WIDE_ROWS,
}
NO_ROWS = range(0)
UNIT = 16
"""Values of a row that the kernel reads at a time: two vectors of AVX2."""


def make_linear(context: BackendContext) -> NativeLinear | None:
    """The products of the context's CPU; None where torch's own are not slower, or where there are
    no kernels and no compiler.

    torch multiplies bfloat16 by the CPU's own instructions, or in wide blocks, from AVX-512 on.
    Raises BackendFailed where the kernels cannot be compiled.
    """
    platform = context.platform
    has_kernels = "cxx_compiler" in platform.features or bool(shipped(platform.arch))
    is_slow = platform.features >= set(AVX2.features) and not (
        platform.features >= set(AVX512.features)
    )
    if not has_kernels or not is_slow or serving(platform.arch, platform.features) is not AVX2:
        return None
    return NativeLinear(context)


class NativeLinear:
    """A `LinearKernel` without AVX-512, whose kernels write after the end of rows that are not
    multiples of 32 values."""

    op = None

    def __init__(self, context: BackendContext) -> None:
        platform = context.platform
        usable = platform.features & {*AVX2.features, "cxx_compiler"}
        self._multiply = load_linear(replace(platform, features=usable))

    def rows(self, weight: torch.Tensor) -> range:
        """The numbers of rows that the kernel multiplies by a weight [N, K] faster than torch."""
        fits = weight.dim() == 2 and weight.stride(-1) == 1 and weight.shape[-1] % UNIT == 0
        is_served = fits and weight.is_cpu and weight.numel() > 0
        return ROWS.get(weight.dtype, NO_ROWS) if is_served else NO_ROWS

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """x [..., K] times the transposed weight [N, K] plus bias [N]: [..., N] of x's dtype.

        Sums are float32. Raises InvalidInput for operands of several dtypes or of shapes that do
        not fit.
        """
        num_out, width = weight.shape
        biased = bias is None or (bias.dtype is weight.dtype and bias.shape == (num_out,))
        if x.dtype is not weight.dtype or x.shape[-1] != width or not biased:
            got = f"x {x.dtype} {tuple(x.shape)}, weight {weight.dtype} {tuple(weight.shape)}"
            raise InvalidInput("x", got=got, expected="one dtype, x [..., K] and bias [N]")
        rows = x if x.dim() == 2 and x.stride(-1) == 1 else x.reshape(-1, width).contiguous()
        bias = None if bias is None else bias.contiguous()
        out = x.new_empty((*x.shape[:-1], num_out))
        call = Linear(
            x=rows.data_ptr(),
            weight=weight.data_ptr(),
            bias=None if bias is None else bias.data_ptr(),
            out=out.data_ptr(),
            x_row=rows.stride(0),
            weight_row=weight.stride(0),
            out_row=num_out,
            num_rows=rows.shape[0],
            width=width,
            num_out=num_out,
            type=TYPES[x.dtype],
            num_threads=torch.get_num_threads(),
        )
        self._multiply(call)
        return out
