"""Decoding over chosen pages: bounds of keys, scores of pages, the choice, and copies."""

from __future__ import annotations

import triton
import triton.language as tl

LEAST_INT: tl.constexpr = tl.constexpr(-(2**31))


@triton.jit(do_not_specialize=["num_tokens", "num_pages"])
def widen_bounds(
    keys, lower, upper, loc, num_tokens, num_pages,
    WIDTH: tl.constexpr, PAGE: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_W: tl.constexpr,
):  # fmt: skip
    """keys [slots, WIDTH], WIDTH = Hkv * D; lower, upper [num_pages, WIDTH] of the same dtype; loc
    [T] int64: the slots of new tokens, in any order. A page whose first slot is among them is
    bounded anew. NaN counts for nothing.

    Grid: tokens, blocks of BLOCK_W columns. A program takes in all tokens of its page. Programs of
    the same page write the same bounds, whichever of them read their old values.
    """
    token = tl.program_id(0)
    page = tl.load(loc + token) // PAGE
    before = tl.load(loc + token - 1, mask=token > 0, other=0) // PAGE
    # Page 0 is padding's. A token that follows one of its own page leaves the page to that one
    if (page > 0) & (page < num_pages) & (page != before):
        within = tl.arange(0, BLOCK_P)
        is_new = tl.zeros([BLOCK_P], tl.int32)
        for first in range(0, num_tokens, BLOCK_T):
            other = first + tl.arange(0, BLOCK_T)
            slot = tl.load(loc + other, mask=other < num_tokens, other=0)
            found = (slot - page * PAGE)[:, None] == within[None, :]
            is_new = tl.maximum(is_new, tl.max(found.to(tl.int32), 0))
        column = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
        is_column = column < WIDTH
        is_there = ((is_new > 0) & (within < PAGE))[:, None] & is_column[None, :]
        key = tl.load(
            keys + (page * PAGE + within)[:, None] * WIDTH + column[None, :],
            mask=is_there,
            other=0.0,
        ).to(tl.float32)
        low = tl.min(tl.where(is_there, key, float("inf")), 0)
        high = tl.max(tl.where(is_there, key, -float("inf")), 0)
        opens = tl.sum(tl.where(within == 0, is_new, 0), 0)
        is_old = is_column & (opens == 0)
        place = page * WIDTH + column
        old_low = tl.load(lower + place, mask=is_old, other=float("inf")).to(tl.float32)
        old_high = tl.load(upper + place, mask=is_old, other=-float("inf")).to(tl.float32)
        low, high = tl.minimum(low, old_low), tl.maximum(high, old_high)
        tl.store(lower + place, low.to(lower.dtype.element_ty), mask=is_column)
        tl.store(upper + place, high.to(upper.dtype.element_ty), mask=is_column)


@triton.jit(do_not_specialize=["width"])
def score_pages(
    q, q_stride, q_head_stride, lower, upper, table, table_stride, rows, lens, scores, width,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    FIRST: tl.constexpr, LAST: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """q [B, HEADS * GROUP, DIM], HEADS of KV; lower, upper [pages, HEADS, DIM]; table [R, W] int32,
    slots; rows [B], those of the requests; lens [B].

    scores [B, HEADS, width] float32: of each page of a request the largest, over its query heads,
    of the sums over columns of max(q * lower, q * upper); inf for the FIRST and the LAST ones, -inf
    beyond them.
    Grid: requests, blocks of BLOCK_N pages, heads.
    """
    request, head = tl.program_id(0).to(tl.int64), tl.program_id(2)
    count = (tl.load(lens + request).to(tl.int32) + (PAGE - 1)) // PAGE
    place = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_page = (place < count) & (place < width)
    score = tl.full([BLOCK_N], -float("inf"), tl.float32)
    if tl.program_id(1) * BLOCK_N < count:
        row = tl.load(rows + request).to(tl.int64)
        slot = tl.load(table + row * table_stride + place * PAGE, mask=is_page, other=0)
        bounds = (slot // PAGE).to(tl.int64) * (HEADS * DIM) + head * DIM
        query = tl.arange(0, BLOCK_G)
        is_query = query < GROUP
        products = tl.zeros([BLOCK_N, BLOCK_G], tl.float32)
        for first in tl.static_range(0, DIM, BLOCK_D):
            column = first + tl.arange(0, BLOCK_D)
            is_column = column < DIM
            values = tl.load(
                q + request * q_stride + (head * GROUP + query)[None, :] * q_head_stride
                + column[:, None],
                mask=is_query[None, :] & is_column[:, None],
                other=0.0,
            )  # fmt: skip
            is_there = is_page[:, None] & is_column[None, :]
            low = tl.load(lower + bounds[:, None] + column[None, :], mask=is_there, other=0.0)
            high = tl.load(upper + bounds[:, None] + column[None, :], mask=is_there, other=0.0)
            if values.dtype != low.dtype:
                values, low = values.to(tl.float32), low.to(tl.float32)
                high = high.to(tl.float32)
            # max(q * lower, q * upper) is q * upper where q > 0, else q * lower
            zero = tl.zeros_like(values)
            positive, negative = (
                tl.where(values > 0, values, zero),
                tl.where(values > 0, zero, values),
            )
            products += tl.dot(high, positive, input_precision=PRECISION)
            products += tl.dot(low, negative, input_precision=PRECISION)
        best = tl.max(tl.where(is_query[None, :], products, -float("inf")), 1)
        is_always = (place < FIRST) | (place >= count - LAST)
        score = tl.where(is_page, tl.where(is_always, float("inf"), best), score)
    tl.store(scores + (request * HEADS + head) * width + place, score, mask=place < width)


@triton.jit(do_not_specialize=["width", "number"])
def choose_places(
    scores, lens, places, width, number,
    HEADS: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """scores [B * HEADS, width] float32; lens [B]: tokens of each request, in pages of PAGE.

    places [B * HEADS, number] int64: of the `number` largest scores, ascending, and of equal ones
    the first; of requests of no more pages 0, 1, 2 ...
    Grid: rows of scores. BLOCK_N is at least width, and width at least number.
    """
    line = tl.program_id(0).to(tl.int64)
    count = (tl.load(lens + line // HEADS).to(tl.int32) + (PAGE - 1)) // PAGE
    place = tl.arange(0, BLOCK_N)
    if count <= number:
        tl.store(places + line * number + place, place.to(tl.int64), mask=place < number)
    else:
        is_page = (place < count) & (place < width)
        bits = tl.load(scores + line * width + place, mask=is_page, other=0.0)
        bits = bits.to(tl.int32, bitcast=True)
        # Integers in the order of the floats
        key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
        key = tl.where(is_page, key, LEAST_INT)
        # The largest integer that `number` keys reach, from its highest bit, the sign, downwards
        reach = tl.sum((key >= 0).to(tl.int32), 0)
        least = tl.where(reach >= number, 0, LEAST_INT)
        for step in range(31):
            higher = least | (1 << (30 - step))
            reach = tl.sum((key >= higher).to(tl.int32), 0)
            least = tl.where(reach >= number, higher, least)
        is_above = key > least
        room = number - tl.sum(is_above.to(tl.int32), 0)
        is_equal = key == least
        is_taken = is_above | (is_equal & (tl.cumsum(is_equal.to(tl.int32), 0) <= room))
        at = tl.cumsum(is_taken.to(tl.int32), 0) - 1
        tl.store(places + line * number + at, place.to(tl.int64), mask=is_taken)


@triton.jit(do_not_specialize=["number"])
def copy_pages(
    k, v, k_copies, v_copies, table, table_stride, rows, lens, places, number,
    HEADS: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """k, k_copies [slots, HEADS, K_DIM]; v, v_copies [slots, HEADS, V_DIM]; table [R, W] int32,
    slots; rows [B], those of the requests; lens [B]; places [B, HEADS, number] int64.

    Copies page places[b, h, i] of request b, of head h, to page 1 + b * number + i. Places beyond
    a request's last page are left out.
    Grid: requests, blocks of BLOCK_T tokens of their copies, heads.
    """
    request, head = tl.program_id(0).to(tl.int64), tl.program_id(2)
    count = (tl.load(lens + request).to(tl.int32) + (PAGE - 1)) // PAGE
    token = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    if tl.program_id(1) * BLOCK_T < tl.minimum(count, number) * PAGE:
        page = token // PAGE
        is_there = page < number
        place = tl.load(places + (request * HEADS + head) * number + page, mask=is_there, other=0)
        is_there = is_there & (place < count)
        row = tl.load(rows + request).to(tl.int64)
        first = tl.load(table + row * table_stride + place * PAGE, mask=is_there, other=0)
        # The table may end within a page
        source = (first // PAGE * PAGE + token % PAGE).to(tl.int64) * HEADS + head
        target = (PAGE + request * number * PAGE + token) * HEADS + head
        column = tl.arange(0, BLOCK_K)
        mask = is_there[:, None] & (column < K_DIM)[None, :]
        values = tl.load(k + source[:, None] * K_DIM + column[None, :], mask=mask)
        tl.store(k_copies + target[:, None] * K_DIM + column[None, :], values, mask=mask)
        column = tl.arange(0, BLOCK_V)
        mask = is_there[:, None] & (column < V_DIM)[None, :]
        values = tl.load(v + source[:, None] * V_DIM + column[None, :], mask=mask)
        tl.store(v_copies + target[:, None] * V_DIM + column[None, :], values, mask=mask)
