"""The product of one row with a weight matrix, which the memory's speed bounds."""

from __future__ import annotations

import triton
import triton.language as tl

from attnmux.triton.kernels.overlap import await_previous


@triton.jit
def activate(values, GATE: tl.constexpr):
    """silu, or gelu ("gelu"), or gelu by tanh ("gelu_tanh"), of float32."""
    if GATE == "silu":
        return values * tl.sigmoid(values)
    if GATE == "gelu":
        return 0.5 * values * (1 + tl.erf(values * 0.7071067811865476))
    # 0.5 * (1 + tanh(u)) is sigmoid(2 * u)
    return values * tl.sigmoid(1.5957691216057308 * (values + 0.044715 * values * values * values))


@triton.jit
def load_blocks(
    rows, start, width, IS_EVEN: tl.constexpr, BLOCK_K: tl.constexpr, EVICTS: tl.constexpr
):  # fmt: skip
    """BLOCK_K columns of one row, or of rows [BLOCK_N, 1] that nothing reads again if EVICTS."""
    column = start + tl.arange(0, BLOCK_K)
    if EVICTS:
        column = column[None, :]
    return tl.load(
        rows + column,
        mask=None if IS_EVEN else column < width,
        other=None if IS_EVEN else 0.0,
        eviction_policy="evict_first" if EVICTS else "",
    )


@triton.jit(do_not_specialize=["num_out", "num_rotated"])
def multiply_row(
    x, weight, weight_stride, bias, norm_weight, eps, residual, cos, sin, out, num_out, width,
    half, num_rotated,
    NORM_OFFSET: tl.constexpr, GATE: tl.constexpr, IS_EVEN: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """out = weight @ x + bias, with sums in float32, and what a model does before and after it.

    x [width], weight [num_out, width] with contiguous rows, bias [num_out] or None, out [num_out],
    all of one dtype. A program reads BLOCK_N rows of the weight in blocks of BLOCK_K columns,
    STAGES of them ahead. IS_EVEN: width is a multiple of BLOCK_K. OVERLAPS: the launch begins
    before the previous one ends and waits for its results, and lets the next launch begin.

    norm_weight [width]: x is divided by its root mean square, with eps float32 added to the mean,
    and multiplied by norm_weight + NORM_OFFSET. None if x stays as it is.
    What comes after takes the product in the dtype of out. One of these, or none:
    residual [num_out], which is added;
    GATE: out [half] is `activate` of the product's first half, times the second;
    cos, sin [2 * half]: heads of 2 * half columns are rotated, up to column num_rotated.

    Grid: blocks of BLOCK_N rows of the weight. A program has both rows of each pair that lies half
    apart, if there are pairs.
    """
    PAIRED: tl.constexpr = GATE is not None or cos is not None
    place = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row = place < num_out
    # Rows beyond the last repeat it, which spares a mask.
    row = tl.minimum(place, num_out - 1)
    if PAIRED:
        pair = row // 2
        row = pair // half * (2 * half) + pair % half + row % 2 * half
    weights = weight + row.to(tl.int64)[:, None] * weight_stride
    await_previous(OVERLAPS)
    # These are under way while the weight is read.
    if bias is not None:
        biases = tl.load(bias + row)
    if residual is not None:
        residuals = tl.load(residual + row)
    if cos is not None:
        column = row % (2 * half)
        cosines, sines = tl.load(cos + column), tl.load(sin + column)
    # Added up once at the end: a sum over the columns of each block would exchange values of warps.
    sums = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    squares = tl.zeros([BLOCK_K], tl.float32)
    for start in tl.range(0, width, BLOCK_K, num_stages=STAGES):
        values = load_blocks(x, start, width, IS_EVEN, BLOCK_K, False).to(tl.float32)
        tile = load_blocks(weights, start, width, IS_EVEN, BLOCK_K, True)
        if norm_weight is not None:
            squares += values * values
            norm = load_blocks(norm_weight, start, width, IS_EVEN, BLOCK_K, False)
            values *= norm.to(tl.float32) if NORM_OFFSET == 0 else norm.to(tl.float32) + NORM_OFFSET
        sums += tile.to(tl.float32) * values[None, :]
    result = tl.sum(sums, 1)
    if norm_weight is not None:
        result *= tl.rsqrt(tl.sum(squares) / width + eps)
    if bias is not None:
        result += biases.to(tl.float32)
    result = result.to(out.dtype.element_ty)
    if residual is not None:
        result = (result.to(tl.float32) + residuals.to(tl.float32)).to(out.dtype.element_ty)
    if PAIRED:
        low, high = tl.split(tl.reshape(result.to(tl.float32), [BLOCK_N // 2, 2]))
    if GATE is not None:
        pair = tl.program_id(0) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        gated = activate(low, GATE) * high
        tl.store(out + pair, gated.to(out.dtype.element_ty), mask=pair < half)
    else:
        if cos is not None:
            turned = tl.reshape(tl.join(-high, low), [BLOCK_N])
            turned = result.to(tl.float32) * cosines + turned * sines
            result = tl.where(row < num_rotated, turned.to(out.dtype.element_ty), result)
        tl.store(out + row, result, mask=is_row)
