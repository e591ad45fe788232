"""Copies the keys and values of a step out of an 8-bit pool, as 16 bits or turned."""

from __future__ import annotations

import triton
import triton.language as tl

from attnmux.triton.kernels.blocks import load_rows

PIECE = tl.constexpr(64)
"""Keys of a piece of values that are turned."""


@triton.jit(do_not_specialize_on_alignment=["rows", "seq_lens", "starts"])
def widen_keys(
    k, k_stride, k_head_stride, v, v_stride, v_head_stride, slots, slots_stride, rows, seq_lens,
    starts, wide_k, wide_v,
    HEADS: tl.constexpr, REAL_D: tl.constexpr, D: tl.constexpr, REAL_DV: tl.constexpr,
    DV: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write the keys of each request side by side, one request after another.

    k [slots, HEADS, REAL_D], v [slots, HEADS, REAL_DV]: the pool's memory, of 8-bit floats. D and
    DV: powers of 2, at least as many. slots [R, W] int32: slots or, with
    PAGE above 1, pages of each row. rows [B] int64: each request's row; None if request i has
    row i. seq_lens [B] int32: keys of each request. starts [B] int32: its first row of the results.
    wide_k, wide_v [sum of seq_lens, HEADS, REAL_D or REAL_DV], contiguous, of a 16-bit float dtype;
    without wide_k, K is not read. Scales are not applied.

    Grid: heads, blocks of the longest request, requests.
    """
    head, request = tl.program_id(0), tl.program_id(2)
    num_keys = tl.load(seq_lens + request)
    first = tl.program_id(1) * BLOCK_N
    if first >= num_keys:
        return
    key = first + tl.arange(0, BLOCK_N)
    is_there = key < num_keys
    row = request
    if rows is not None:
        row = tl.load(rows + request)
    table = slots + row.to(tl.int64) * slots_stride
    slot = tl.load(table + key // PAGE, mask=is_there, other=0).to(tl.int64)
    if PAGE > 1:
        slot = slot * PAGE + key % PAGE
    to = (tl.load(starts + request) + key).to(tl.int64) * HEADS + head
    of_head = head.to(tl.int64)
    if wide_k is not None:
        _copy(k + of_head * k_head_stride, slot, k_stride, is_there, wide_k, to, REAL_D, D)
    _copy(v + of_head * v_head_stride, slot, v_stride, is_there, wide_v, to, REAL_DV, DV)


@triton.jit(do_not_specialize_on_alignment=["rows", "seq_lens", "starts"])
def turn_values(
    v, v_stride, v_head_stride, slots, slots_stride, rows, seq_lens, starts, turned,
    HEADS: tl.constexpr, WORDS: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Write the values of each request in pieces of 64 keys, whose columns have their keys side by
    side, for products of 8 bits with weights.

    v [slots, HEADS, WORDS] int32: each word is 4 columns of 8 bits; WORDS is a power of 2. slots,
    rows and seq_lens: as in `widen_keys`. turned [pieces, HEADS, 4 * WORDS, 16] int32: a column's
    words are each of 4 keys: 0, 1, 8, 9, then 2, 3, 10, 11 and so on of every 16, see
    `order_weights`. A request has an even number of pieces, with 0 after its last key. starts [B]
    int32: its first one.

    Grid: heads, pieces of the longest request, requests.
    """
    head, piece, request = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_keys = tl.load(seq_lens + request)
    if piece // 2 * 2 * PIECE >= num_keys:
        return
    row = request
    if rows is not None:
        row = tl.load(rows + request)
    table = slots + row.to(tl.int64) * slots_stride
    v += head.to(tl.int64) * v_head_stride
    four, word = tl.arange(0, 16), tl.arange(0, WORDS)
    key = piece * PIECE + four // 4 * 16 + four % 4 * 2
    first = _words(v, v_stride, table, key, num_keys, WORDS, PAGE)
    second = _words(v, v_stride, table, key + 1, num_keys, WORDS, PAGE)
    third = _words(v, v_stride, table, key + 8, num_keys, WORDS, PAGE)
    fourth = _words(v, v_stride, table, key + 9, num_keys, WORDS, PAGE)
    to = ((tl.load(starts + request) + piece).to(tl.int64) * HEADS + head) * (WORDS * PIECE)
    for byte in tl.static_range(4):
        low = _byte(first, byte) | (_byte(second, byte) << 8)
        high = _byte(third, byte) | (_byte(fourth, byte) << 8)
        column = word * 4 + byte
        tl.store(turned + to + column[None, :] * 16 + four[:, None], low | (high << 16))


@triton.jit
def _words(v, v_stride, table, key, num_keys, WORDS: tl.constexpr, PAGE: tl.constexpr):
    is_there = key < num_keys
    slot = tl.load(table + key // PAGE, mask=is_there, other=0).to(tl.int64)
    if PAGE > 1:
        slot = slot * PAGE + key % PAGE
    return load_rows(v, slot, v_stride, is_there, WORDS, WORDS, True)


@triton.jit
def _byte(words, AT: tl.constexpr):
    return (words >> (8 * AT)) & 255


@triton.jit
def _copy(base, slot, stride, is_there, wide, to, REAL_D: tl.constexpr, D: tl.constexpr):
    rows = load_rows(base, slot, stride, is_there, D, REAL_D, True)
    column = tl.arange(0, D)
    is_written = is_there[:, None] & (column < REAL_D)[None, :]
    places = to[:, None] * REAL_D + column[None, :]
    tl.store(wide + places, rows.to(wide.dtype.element_ty), mask=is_written)
