"""Linear layers on CPUs whose torch has no fast products of narrow values."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attnmux.core import InvalidInput
from attnmux.cpu.levels import AVX2, AVX512, serving, shipped
from attnmux.cpu.native.library import TYPES, Linear, load_linear

if TYPE_CHECKING:
    from attnmux.core import BackendContext

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WIDE_ROWS = range(2, 17)
"""Of float32: torch is as fast with others. See benchmarks/results/native-cpu.md."""
UNIT = 16
"""Values of a row that the kernel reads at a time."""


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
    """A `LinearKernel`."""

    def __init__(self, context: BackendContext) -> None:
        self._multiply = load_linear(context.platform)

    def serves(self, weight: torch.Tensor) -> bool:
        """Whether the kernel multiplies by a weight [N, K]."""
        fits = weight.dim() == 2 and weight.stride(-1) == 1 and weight.shape[-1] % UNIT == 0
        return fits and weight.is_cpu and weight.dtype in DTYPES and weight.numel() > 0

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
        rows = x.reshape(-1, width)
        num_rows = len(rows)
        if not num_rows or (x.dtype is torch.float32 and num_rows not in WIDE_ROWS):
            return torch.nn.functional.linear(x, weight, bias)
        rows = rows if rows.stride(-1) == 1 else rows.contiguous()
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
            num_rows=num_rows,
            width=width,
            num_out=num_out,
            type=TYPES[x.dtype],
            num_threads=torch.get_num_threads(),
        )
        self._multiply(call)
        return out
