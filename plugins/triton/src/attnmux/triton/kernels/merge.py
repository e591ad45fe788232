"""Merges partial results of attention."""

from __future__ import annotations

import triton
import triton.language as tl

MOST_SPLITS = tl.constexpr(32)
"""Partial results of a row that `merge_splits` merges."""


@triton.jit
def merge_rows(
    out_a, out_a_stride, out_a_head_stride, out_a_column_stride,
    lse_a, lse_a_stride, lse_a_head_stride,
    out_b, out_b_stride, out_b_head_stride, out_b_column_stride,
    lse_b, lse_b_stride, lse_b_head_stride, out, out_stride, out_head_stride, out_column_stride,
    lse, lse_stride, lse_head_stride, num_rows,
    HEADS: tl.constexpr, DV: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """out_a, out_b, out [T, HEADS, DV] of any float dtype; lse_a, lse_b, lse [T, HEADS] float32,
    natural logarithms. All of any strides, in elements.

    Grid: blocks of BLOCK_R rows, of num_rows = T * HEADS. A program reads both parts of a column,
    and both LSE, before it writes them: the result may be in the memory of a part.
    """
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    is_row = row < num_rows
    token = (row // HEADS).to(tl.int64)
    head = (row % HEADS).to(tl.int64)
    empty = -float("inf")
    top_a = tl.load(
        lse_a + token * lse_a_stride + head * lse_a_head_stride, mask=is_row, other=empty
    )
    top_b = tl.load(
        lse_b + token * lse_b_stride + head * lse_b_head_stride, mask=is_row, other=empty
    )
    top = tl.maximum(top_a, top_b)
    # Without keys on either side: inf - inf is NaN.
    base = tl.where(top == empty, 0.0, top)
    weight_a = tl.exp(top_a - base)
    weight_b = tl.exp(top_b - base)
    mass = weight_a + weight_b
    is_empty = mass == 0.0
    mass = tl.where(is_empty, 1.0, mass)
    weight_a = weight_a / mass
    weight_b = weight_b / mass
    # A side without keys is not read.
    reads_a = is_row & (top_a != empty)
    reads_b = is_row & (top_b != empty)
    for first in tl.static_range(0, DV, BLOCK_D):
        column = (first + tl.arange(0, BLOCK_D)).to(tl.int64)
        is_column = (column < DV)[None, :]
        a = tl.load(
            out_a
            + (token * out_a_stride + head * out_a_head_stride)[:, None]
            + (column * out_a_column_stride)[None, :],
            mask=reads_a[:, None] & is_column,
            other=0.0,
        )
        b = tl.load(
            out_b
            + (token * out_b_stride + head * out_b_head_stride)[:, None]
            + (column * out_b_column_stride)[None, :],
            mask=reads_b[:, None] & is_column,
            other=0.0,
        )
        merged = a.to(tl.float32) * weight_a[:, None] + b.to(tl.float32) * weight_b[:, None]
        tl.store(
            out
            + (token * out_stride + head * out_head_stride)[:, None]
            + (column * out_column_stride)[None, :],
            merged.to(out.dtype.element_ty),
            mask=is_row[:, None] & is_column,
        )
    tl.store(
        lse + token * lse_stride + head * lse_head_stride,
        tl.where(is_empty, empty, base + tl.log(mass)),
        mask=is_row,
    )


@triton.jit(do_not_specialize=["num_rows", "num_splits"])
def merge_splits(
    parts, part_lse, sinks, out, out_stride, lse, lse_stride, num_rows, num_splits,
    HEADS: tl.constexpr, DV: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_LSE: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The softmax over the keys of all splits, and the sinks.

    parts [num_splits, T, HEADS, DV] and part_lse [num_splits, T, HEADS] float32: the results over
    each split's keys, without sinks, natural logarithms. sinks [HEADS] float32. out [T, HEADS, DV]
    and lse [T, HEADS] float32: a token's heads side by side.

    num_splits: at most MOST_SPLITS. Grid: blocks of BLOCK_R rows, of num_rows = T * HEADS.
    """
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    is_row = row < num_rows
    token = (row // HEADS).to(tl.int64)
    head = row % HEADS
    split = tl.arange(0, MOST_SPLITS)
    empty = -float("inf")
    tops = tl.load(
        part_lse + split.to(tl.int64)[:, None] * num_rows + row[None, :],
        mask=(split < num_splits)[:, None] & is_row[None, :],
        other=empty,
    )
    top = tl.max(tops, 0)
    if HAS_SINKS:
        sink = tl.load(sinks + head)
        top = tl.maximum(top, sink)
    # Neither keys nor a sink: inf - inf is NaN.
    base = tl.where(top == empty, 0.0, top)
    mass = tl.sum(tl.exp(tops - base[None, :]), 0)
    if HAS_SINKS:
        mass += tl.exp(sink - base)
    is_empty = mass == 0.0
    mass = tl.where(is_empty, 1.0, mass)
    column = tl.arange(0, BLOCK_D)
    is_column = (column < DV)[None, :]
    acc = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
    for one in range(num_splits):
        place = row.to(tl.int64) + one * num_rows
        part_top = tl.load(part_lse + place, mask=is_row, other=empty)
        values = tl.load(
            parts + place[:, None] * DV + column[None, :],
            mask=(part_top != empty)[:, None] & is_column,
            other=0.0,
        )
        acc += values * (tl.exp(part_top - base) / mass)[:, None]
    tl.store(
        out + token[:, None] * out_stride + (head * DV)[:, None] + column[None, :],
        acc.to(out.dtype.element_ty),
        mask=is_row[:, None] & is_column,
    )
    if HAS_LSE:
        value = tl.where(is_empty, empty, base + tl.log(mass))
        tl.store(lse + token * lse_stride + head, value, mask=is_row)
