"""Products of one row with a model's weights, for steps that decode one request."""

from __future__ import annotations

from dataclasses import dataclass
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Blocks:
    """How a program reads a weight."""

    rows: int = 8
    columns: int = 256
    stages: int = 4
    """Blocks that are read ahead."""
    warps: int = 4


EAGER = PLAIN_BLOCKS = Blocks()
"""How eager calls read a weight, and compiled code that of a product without a norm."""

NORMED_BLOCKS = Blocks(rows=16)
"""How compiled code reads a weight after a norm, which each program computes: fewer programs are
faster. See benchmarks/results/compiled-h200.md#one-request."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Around:
    """What a model does with x before a product, and with the product after it."""

    norm_weight: torch.Tensor | None = None
    """[K]. Divide x by its root mean square and multiply it by this plus `norm_offset`."""
    norm_offset: float = 0.0
    eps: float = 0.0
    """What is added to the mean of the squares."""
    residual: torch.Tensor | None = None
    """N values. Add them to the product."""
    gate: str | None = None
    """"silu", "gelu" or "gelu_tanh". Apply it to the product's first half and multiply it by the
    second."""
    cos: torch.Tensor | None = None
    """With `sin`, D values of heads of D columns, of which the halves are rotated."""
    sin: torch.Tensor | None = None
    num_rotated: int = 0
    """Columns of the product that are rotated, from the first one on."""


PLAIN = Around()


@torch.library.custom_op("attnmux_triton::multiply_row", mutates_args=())
def multiply_row_op(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """`multiply_row` for compiled code."""
    return multiply_row(x, weight, bias, blocks=PLAIN_BLOCKS)


@multiply_row_op.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


@torch.library.custom_op("attnmux_triton::multiply_row_fused", mutates_args=())
def multiply_row_fused_op(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    norm_offset: float = 0.0,
    eps: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    gate: str | None = None,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    num_rotated: int = 0,
) -> torch.Tensor:
    """`multiply_row` with what is around the product, for compiled code. eps: [] on the CPU."""
    around = Around(
        norm_weight=norm_weight,
        norm_offset=norm_offset,
        eps=0.0 if eps is None else float(eps),
        residual=residual,
        gate=gate,
        cos=cos,
        sin=sin,
        num_rotated=num_rotated,
    )
    blocks = PLAIN_BLOCKS if norm_weight is None else NORMED_BLOCKS
    return multiply_row(x, weight, bias, around, blocks)


@multiply_row_fused_op.register_fake
def _(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    norm_offset: float = 0.0,
    eps: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    gate: str | None = None,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    num_rotated: int = 0,
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0] // (1 if gate is None else 2)))


class OneRowProducts:
    """A `LinearKernel` for one row of 16-bit values."""

    op = torch.ops.attnmux_triton.multiply_row.default
    fused = torch.ops.attnmux_triton.multiply_row_fused.default

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


def multiply_row(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    around: Around = PLAIN,
    blocks: Blocks = EAGER,
) -> torch.Tensor:
    """x [..., K] of one row times the transposed weight [N, K] plus bias [N]: [..., N], and what is
    around the product, [..., N / 2] if it is gated.

    All of one dtype; sums are float32. Raises InvalidInput for several rows, for operands of
    several dtypes and for shapes that do not fit.
    """
    num_out, width = weight.shape
    fits = x.shape[-1:] == (width,) and x.numel() == width and x.dtype is weight.dtype
    if not fits or not (bias is None or (bias.dtype is x.dtype and bias.shape == (num_out,))):
        got = f"x {x.dtype} {tuple(x.shape)}, weight {weight.dtype} {tuple(weight.shape)}"
        raise InvalidInput("x", got=got, expected="one row [..., K] and bias [N] of one dtype")
    if around is not PLAIN:
        _check(around, num_out, x)
    half = 0 if around.cos is None else around.cos.shape[-1] // 2
    half = half if around.gate is None else num_out // 2
    out = x.new_empty((*x.shape[:-1], num_out if around.gate is None else half))
    others = (bias, around.norm_weight, around.residual, around.cos, around.sin)
    given = tuple(None if each is None else each.contiguous() for each in others)
    _bound(
        tuple(each is None for each in given),
        around.gate,
        around.norm_offset,
        width % blocks.columns == 0,
        x.is_cuda,
        blocks,
    )(
        (-(-num_out // blocks.rows), 1, 1),
        (x.contiguous(), weight, out, *given),
        (weight.stride(0), width, half, around.eps),
        (num_out, around.num_rotated),
        x.dtype,
    )
    return out


def _check(around: Around, num_out: int, x: torch.Tensor) -> None:
    """Raise InvalidInput unless what is around a product fits it."""
    sizes = (
        (around.norm_weight, x.numel()),
        (around.residual, num_out),
        (around.cos, None if around.sin is None else around.sin.numel()),
    )
    after = [each for each in (around.residual, around.gate, around.cos) if each is not None]
    fits = all(
        each is None or (each.dtype is x.dtype and each.numel() == size) for each, size in sizes
    )
    unit = 1 if around.cos is None else around.cos.numel()
    is_whole = num_out % unit == 0 and around.num_rotated % unit == 0
    if not fits or len(after) > 1 or not is_whole or (around.gate and num_out % 2):
        expected = "a norm of K, then a residual of N, a gate of an even N, or whole heads, "
        raise InvalidInput("around", got=repr(around), expected=f"{expected}all of x's dtype")


@cache
def _bound(
    missing: tuple[bool, ...],
    gate: str | None,
    norm_offset: float,
    is_even: bool,
    overlaps: bool,
    blocks: Blocks,
) -> BoundKernel:
    """The kernel of all models: only strides and widths are compiled into it.

    missing: which optional tensors are None.
    """
    return BoundKernel(
        Launcher(),
        kernel,
        {
            "NORM_OFFSET": norm_offset,
            "GATE": gate,
            "IS_EVEN": is_even,
            "BLOCK_N": blocks.rows,
            "BLOCK_K": blocks.columns,
            "STAGES": blocks.stages,
            "OVERLAPS": overlaps,
        },
        tensors=("x", "weight", "out", "bias", "norm_weight", "residual", "cos", "sin"),
        numbers=("weight_stride", "width", "half", "eps"),
        counts=("num_out", "num_rotated"),
        options={"num_warps": blocks.warps, **({"launch_pdl": True} if overlaps else {})},
    )


def make_linear(context: BackendContext) -> OneRowProducts | None:
    """The products of one row if they were measured to be faster than torch's: on Hopper."""
    return OneRowProducts() if context.platform.arch == "sm90" else None
