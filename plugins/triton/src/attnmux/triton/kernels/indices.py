"""Builds the indices of attention kernels from lengths and the request table.

All lengths, indices and tables are int32, except `rows [B]`, a request's row in the table, int64.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["batch_size"], do_not_specialize_on_alignment=["lens"])
def sum_lens(
    lens,
    factors,
    factor,
    result,
    result_stride,
    batch_size,
    PAGE: tl.constexpr,
    HAS_FACTORS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """result [B + 1]: 0 and the running sums of lens [B] in pages, times factors [B] or factor.

    Grid: one program, since a batch is short.
    """
    tl.store(result, 0)
    before = tl.load(lens, mask=False, other=0)
    for first in range(0, batch_size, BLOCK):
        request = first + tl.arange(0, BLOCK)
        is_request = request < batch_size
        terms = tl.load(lens + request, mask=is_request, other=0)
        if PAGE > 1:
            terms = (terms + PAGE - 1) // PAGE
        if HAS_FACTORS:
            terms = terms * tl.load(factors + request, mask=is_request, other=0)
        else:
            terms = terms * factor
        sums = before + tl.cumsum(terms, 0)
        tl.store(result + (request + 1).to(tl.int64) * result_stride, sums, mask=is_request)
        before += tl.sum(terms, 0)


@triton.jit(do_not_specialize_on_alignment=["rows", "lens", "new_lens", "starts"])
def fill_seen_pages(
    table, table_stride, rows, lens, new_lens, starts, slot_map, result, result_stride,
    LENS_SHIFT: tl.constexpr, QUERIES: tl.constexpr, WINDOW: tl.constexpr, PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """result [B, width]: a pool's own pages of the keys that a step's new tokens see.

    table [R, width]; slot_map: the pool's slot for each slot of the table. lens [B]: lens +
    LENS_SHIFT tokens precede the new ones. There are new_lens [B] new tokens or, if that is None,
    QUERIES. starts [B]: the first key's column; None for 0. Columns are filled from the block of
    BLOCK that holds the first key in the window, since kernels load whole blocks.
    Grid: requests, programs that share a request's blocks.
    """
    request = tl.program_id(0)
    cached = tl.load(lens + request) + LENS_SHIFT
    num_keys = cached + QUERIES
    if new_lens is not None:
        num_keys = cached + tl.load(new_lens + request)
    first = 0
    if WINDOW >= 0:
        first = tl.maximum(cached - WINDOW, 0) // (BLOCK * PAGE)
    begin = table + tl.load(rows + request).to(tl.int64) * table_stride
    if starts is not None:
        begin += tl.load(starts + request)
    end = (num_keys + PAGE - 1) // PAGE
    place_in_block = tl.arange(0, BLOCK)
    for block in range(first + tl.program_id(1), (end + BLOCK - 1) // BLOCK, tl.num_programs(1)):
        place = block * BLOCK + place_in_block
        is_seen = place < end
        slot = tl.load(begin + place * PAGE, mask=is_seen, other=0)
        own = tl.load(slot_map + slot, mask=is_seen, other=0)
        tl.store(result + request.to(tl.int64) * result_stride + place, own // PAGE, mask=is_seen)


@triton.jit
def look_up_picks(
    table,
    table_width,
    rows,
    picks,
    picks_stride,
    result,
    topk,
    BLOCK: tl.constexpr,
):
    """result [T, topk]: the slot of each picked place, -1 for -1.

    table [R, table_width]; rows [T] int64: each token's row in it; picks [T, topk]: places in the
    token's request. Grid: tokens, blocks of picks.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = column < topk
    place = tl.load(picks + token * picks_stride + column, mask=is_column, other=-1)
    row = tl.load(rows + token)
    slots = tl.load(table + row * table_width + place, mask=place >= 0, other=-1)
    tl.store(result + token * topk + column, slots, mask=is_column)
