"""Products of one row with a model's weights, for steps that decode one request."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch

from attnmux.core import InvalidInput
from attnmux.triton.kernels.one_row import multiply_row as kernel
from attnmux.triton.launches.bound_kernel import BoundKernel, Launcher

if TYPE_CHECKING:
    from attnmux.core import BackendContext

DTYPES = torch.bfloat16, torch.float16
ONE_ROW, NO_ROWS = range(1, 2), range(0)
"""torch is as fast with more rows. See benchmarks/results/one-row-h200.md."""
BLOCK_N, BLOCK_K, STAGES, WARPS = 8, 256, 4, 4


@torch.library.custom_op("attnmux_triton::multiply_row", mutates_args=())
def multiply_row_op(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """`multiply_row` for compiled code."""
    return multiply_row(x, weight, bias)


@multiply_row_op.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


class OneRowProducts:
    """A `LinearKernel` for one row of 16-bit values."""

    op = torch.ops.attnmux_triton.multiply_row.default

    def rows(self, weight: torch.Tensor) -> range:
        """The numbers of rows that the kernel multiplies by a weight [N, K] faster than torch."""
        is_served = (
            weight.dim() == 2
            and weight.stride(1) == 1
            and weight.dtype in DTYPES
            and weight.numel() > 0
        )
        return ONE_ROW if is_served else NO_ROWS

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """See `multiply_row`."""
        return multiply_row(x, weight, bias)


def multiply_row(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [..., K] of one row times the transposed weight [N, K] plus bias [N]: [..., N].

    All of one dtype; sums are float32. Raises InvalidInput for several rows, for operands of
    several dtypes and for shapes that do not fit.
    """
    num_out, width = weight.shape
    fits = x.shape[-1:] == (width,) and x.numel() == width and x.dtype is weight.dtype
    if not fits or not (bias is None or (bias.dtype is x.dtype and bias.shape == (num_out,))):
        got = f"x {x.dtype} {tuple(x.shape)}, weight {weight.dtype} {tuple(weight.shape)}"
        raise InvalidInput("x", got=got, expected="one row [..., K] and bias [N] of one dtype")
    out = x.new_empty((*x.shape[:-1], num_out))
    _bound(bias is None, width % BLOCK_K == 0, x.is_cuda)(
        (-(-num_out // BLOCK_N), 1, 1),
        (x.contiguous(), weight, None if bias is None else bias.contiguous(), out),
        (weight.stride(0), width),
        (num_out,),
        x.dtype,
    )
    return out


@cache
def _bound(has_no_bias: bool, is_even: bool, overlaps: bool) -> BoundKernel:
    """The kernel of all models: only strides and widths are compiled into it."""
    return BoundKernel(
        Launcher(),
        kernel,
        {
            "IS_EVEN": is_even,
            "BLOCK_N": BLOCK_N,
            "BLOCK_K": BLOCK_K,
            "STAGES": STAGES,
            "OVERLAPS": overlaps,
        },
        tensors=("x", "weight", "bias", "out"),
        numbers=("weight_stride", "width"),
        counts=("num_out",),
        options={"num_warps": WARPS, **({"launch_pdl": True} if overlaps else {})},
    )


def make_linear(context: BackendContext) -> OneRowProducts | None:
    """The products of one row if they were measured to be faster than torch's: on Hopper."""
    return OneRowProducts() if context.platform.arch == "sm90" else None
