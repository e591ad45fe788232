"""Packs the results of all heads for an exchange between ranks, and merges those of all ranks."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def pack_rows(
    out, out_stride, out_head_stride, lse, lse_stride, lse_head_stride,
    packed, packed_lse, num_tokens,
    HEADS: tl.constexpr, SIZE: tl.constexpr, DV: tl.constexpr, COLUMNS: tl.constexpr,
    WORDS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """out [T, SIZE * HEADS, DV] and lse [T, SIZE * HEADS] float32, of any strides except the last
    of out; packed [SIZE, T, HEADS, COLUMNS] of out's dtype; packed_lse, its memory as float32,
    WORDS a row.

    Grid: T * SIZE * HEADS rows.
    """
    row = tl.program_id(0)
    token = (row // (SIZE * HEADS)).to(tl.int64)
    head = row % (SIZE * HEADS)
    target = ((head // HEADS).to(tl.int64) * num_tokens + token) * HEADS + head % HEADS
    column = tl.arange(0, BLOCK_D)
    is_column = column < DV
    values = tl.load(out + token * out_stride + head * out_head_stride + column, mask=is_column)
    tl.store(packed + target * COLUMNS + column, values, mask=is_column)
    found = tl.load(lse + token * lse_stride + head * lse_head_stride)
    tl.store(packed_lse + target * WORDS + WORDS - 1, found)


@triton.jit
def merge_packed_rows(
    packed, packed_lse, out, lse, num_rows,
    SIZE: tl.constexpr, DV: tl.constexpr, COLUMNS: tl.constexpr, WORDS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """packed, packed_lse as of `pack_rows`, of SIZE ranks; out [T * HEADS, DV] of packed's dtype;
    lse [T * HEADS] float32. A part with LSE -inf has no effect.

    Grid: num_rows = T * HEADS.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK_D)
    is_column = column < DV
    most = tl.full((), float("-inf"), tl.float32)
    for rank in tl.static_range(SIZE):
        most = tl.maximum(most, tl.load(packed_lse + (rank * num_rows + row + 1) * WORDS - 1))
    scale = tl.where(most == float("-inf"), 0.0, most)
    total = tl.full((), 0.0, tl.float32)
    merged = tl.zeros((BLOCK_D,), tl.float32)
    for rank in tl.static_range(SIZE):
        part = rank * num_rows + row
        weight = tl.exp(tl.load(packed_lse + (part + 1) * WORDS - 1) - scale)
        values = tl.load(packed + part * COLUMNS + column, mask=is_column, other=0.0)
        # A rank without keys may have left NaN
        merged += tl.where(weight > 0, weight * values.to(tl.float32), 0.0)
        total += weight
    merged = merged / tl.where(total > 0, total, 1.0)
    tl.store(out + row * DV + column, merged.to(out.dtype.element_ty), mask=is_column)
    tl.store(lse + row, tl.where(total > 0, scale + tl.log(total), float("-inf")))
