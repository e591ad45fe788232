"""Builds from lengths and the request table what attention kernels read.

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


@triton.jit
def gather_slots(
    table, table_width, table_cells, rows, indptr, starts, result, result_stride,
    length, batch_size, search_steps,
    PAGE: tl.constexpr, HAS_STARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """result [length] int32: the slot, or the page, at every PAGE-th column of each
    request.

    table [R, table_width], table_cells values; indptr [B + 1]: each request's first place in the
    result; starts [B]: its first column. search_steps: bits of batch_size.
    Grid: blocks of the result, not requests, so that lengths need not be equal.
    """
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_place = place < length
    # The first request that ends after the place; B where none does.
    low = place * 0
    high = low + batch_size
    for _ in range(search_steps):
        middle = (low + high) // 2
        is_open = low < high
        end = tl.load(indptr + 1 + middle, mask=is_place & is_open, other=0)
        is_behind = is_open & (end <= place)
        low = tl.where(is_behind, middle + 1, low)
        high = tl.where(is_behind, high, middle)
    is_used = is_place & (low < batch_size)
    column = (place - tl.load(indptr + low, mask=is_used, other=0)) * PAGE
    if HAS_STARTS:
        column += tl.load(starts + low, mask=is_used, other=0)
    row = tl.load(rows + low, mask=is_used, other=0)
    cell = row * table_width + column
    slot = tl.load(table + cell, mask=is_used & (cell >= 0) & (cell < table_cells), other=0)
    tl.store(
        result + place.to(tl.int64) * result_stride,
        (slot // PAGE).to(result.dtype.element_ty),
        mask=is_place,
    )


@triton.jit
def fill_page_table(
    table, table_width, rows, lens, starts, result, result_stride, result_column_stride, width,
    PAGE: tl.constexpr, HAS_STARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """result [B, width]: the pages of each request's keys, then 0.

    table [R, table_width]; lens [B]: keys; starts [B]: the first key's column. Grid: requests,
    blocks of columns.
    """
    request = tl.program_id(0)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_place = place < width
    column = place * PAGE
    is_used = is_place & (column < tl.load(lens + request))
    if HAS_STARTS:
        column += tl.load(starts + request)
    is_used = is_used & (column >= 0) & (column < table_width)
    row = tl.load(rows + request)
    slot = tl.load(table + row * table_width + column, mask=is_used, other=0)
    tl.store(
        result + request.to(tl.int64) * result_stride + place.to(tl.int64) * result_column_stride,
        slot // PAGE,
        mask=is_place,
    )


@triton.jit
def fill_last_page_lens(
    lens, result, result_stride, batch_size, PAGE: tl.constexpr, BLOCK: tl.constexpr
):
    """result [B]: keys in the last page, PAGE without keys. lens [B]: keys."""
    request = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_request = request < batch_size
    rest = tl.load(lens + request, mask=is_request, other=0) % PAGE
    tl.store(
        result + request.to(tl.int64) * result_stride,
        tl.where(rest == 0, PAGE, rest),
        mask=is_request,
    )


@triton.jit
def view_windows(
    lens, q_lens, num_queries, starts, view_lens, view_lens_stride, view_starts, view_starts_stride,
    batch_size,
    WINDOW: tl.constexpr, PAGE: tl.constexpr, HAS_Q_LENS: tl.constexpr, HAS_STARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """view_lens, view_starts [B]: number and first column of the keys, from the page of the first
    key that any query sees.

    lens [B]: keys; q_lens [B] or num_queries: new tokens; starts [B]: the first key's column.
    """
    request = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_request = request < batch_size
    num_keys = tl.load(lens + request, mask=is_request, other=0)
    first = request * 0
    if WINDOW >= 0:
        if HAS_Q_LENS:
            queries = tl.load(q_lens + request, mask=is_request, other=0)
        else:
            queries = first + num_queries
        first = tl.maximum(num_keys - queries - WINDOW, 0)
        first = first // PAGE * PAGE
    tl.store(view_lens + request.to(tl.int64) * view_lens_stride, num_keys - first, mask=is_request)
    if HAS_STARTS:
        first += tl.load(starts + request, mask=is_request, other=0)
    tl.store(view_starts + request.to(tl.int64) * view_starts_stride, first, mask=is_request)


@triton.jit(do_not_specialize_on_alignment=["rows", "lens", "new_lens", "starts"])
def fill_seen_pages(
    table, table_stride, rows, lens, new_lens, starts, slot_map, result, result_stride,
    LENS_SHIFT: tl.constexpr, QUERIES: tl.constexpr, WINDOW: tl.constexpr, PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """result [B, width]: a pool's own pages of the keys that a step's new tokens see.

    table [R, width]; slot_map: the pool's slot for each slot of the table. lens [B]: lens +
    LENS_SHIFT tokens precede the new ones, of which there are new_lens [B] or, where that is None,
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
