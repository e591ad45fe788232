"""Merges partial results of attention."""

from __future__ import annotations

import triton
import triton.language as tl

MOST_SPLITS = tl.constexpr(32)
"""Partial results of a row that `merge_splits` merges."""


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
