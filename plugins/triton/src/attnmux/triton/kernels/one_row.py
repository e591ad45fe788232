"""The product of one row with a weight matrix, which the memory's speed bounds."""

from __future__ import annotations

import triton
import triton.language as tl

from attnmux.triton.kernels.overlap import await_previous


@triton.jit(do_not_specialize=["num_out"])
def multiply_row(
    x, weight, weight_stride, bias, out, num_out, width,
    IS_EVEN: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """out = weight @ x + bias, with sums in float32.

    x [width], weight [num_out, width] with contiguous rows, bias [num_out] or None, out [num_out],
    all of one dtype. A program reads BLOCK_N rows of the weight in blocks of BLOCK_K columns,
    STAGES of them ahead. IS_EVEN: width is a multiple of BLOCK_K. OVERLAPS: the launch begins
    before the previous one ends and waits for its results, and lets the next launch begin.

    Grid: blocks of BLOCK_N rows of the weight.
    """
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row = row < num_out
    # Rows beyond the last repeat it, which spares a mask.
    weights = weight + tl.minimum(row, num_out - 1).to(tl.int64)[:, None] * weight_stride
    await_previous(OVERLAPS)
    # Added up once at the end: a sum over the columns of each block would exchange values of warps.
    sums = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for start in tl.range(0, width, BLOCK_K, num_stages=STAGES):
        column = start + tl.arange(0, BLOCK_K)
        is_column = None if IS_EVEN else column < width
        other = None if IS_EVEN else 0.0
        values = tl.load(x + column, mask=is_column, other=other)
        tile = tl.load(
            weights + column[None, :],
            mask=None if IS_EVEN else is_column[None, :],
            other=other,
            eviction_policy="evict_first",
        )
        sums += tile.to(tl.float32) * values.to(tl.float32)[None, :]
    result = tl.sum(sums, 1)
    if bias is not None:
        result += tl.load(bias + row, mask=is_row, other=0.0).to(tl.float32)
    tl.store(out + row, result.to(out.dtype.element_ty), mask=is_row)
