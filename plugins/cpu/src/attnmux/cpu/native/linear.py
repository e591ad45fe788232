"""Linear layers on CPUs, for the numbers of rows that torch multiplies more slowly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attnmux.core import InvalidInput
from attnmux.cpu.compiled import is_made
from attnmux.cpu.levels import AMX, AVX2, AVX512, BF16, serving
from attnmux.cpu.native.library import TYPES, Linear, load_linear

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attnmux.core import BackendContext

NO_ROWS = range(0)
EVERY = range(1, 1 << 31)


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """Products that the kernels of a level compute faster than torch:
    benchmarks/results/native-cpu.md."""

    unit: int
    """Values of a row that the kernel reads at a time: two vectors."""
    rows: Mapping[torch.dtype, range]
    """Rows of x, by the dtype."""


SERVED = {
    AVX2.name: Served(
        unit=16,
        rows={torch.bfloat16: EVERY, torch.float16: EVERY, torch.float32: range(2, 17)},
    ),
    AVX512.name: Served(
        unit=32,
        rows={
            torch.bfloat16: EVERY,
            torch.float16: range(2, 1 << 31),
            torch.float32: range(1, 33),
        },
    ),
    AMX.name: Served(
        unit=32,
        rows={
            torch.bfloat16: range(1, 9),
            torch.float16: range(2, 9),
            torch.float32: range(4, 9),
        },
    ),
    BF16.name: Served(
        unit=32,
        rows={
            torch.bfloat16: range(1, 129),
            torch.float16: range(2, 1 << 31),
            torch.float32: range(1, 33),
        },
    ),
}
"""By the level's name. Others were not found to be faster."""


def make_linear(context: BackendContext) -> NativeLinear | None:
    """The products of the context's CPU; None if torch's own are not slower, or if the kernels are
    not there: only the backend `native` compiles them."""
    platform = context.platform
    is_served = serving(platform.arch, platform.features).name in SERVED
    return NativeLinear(context) if is_served and is_made(platform) else None


class NativeLinear:
    """A `LinearKernel`."""

    op = fused = None

    def __init__(self, context: BackendContext) -> None:
        platform = context.platform
        self._served = SERVED[serving(platform.arch, platform.features).name]
        self._multiply = load_linear(platform)

    def rows(self, weight: torch.Tensor) -> range:
        """The numbers of rows that the kernel multiplies by a weight [N, K] faster than torch."""
        unit = self._served.unit
        fits = weight.dim() == 2 and weight.stride(-1) == 1 and weight.shape[-1] % unit == 0
        is_served = fits and weight.is_cpu and weight.numel() > 0
        return self._served.rows.get(weight.dtype, NO_ROWS) if is_served else NO_ROWS

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
