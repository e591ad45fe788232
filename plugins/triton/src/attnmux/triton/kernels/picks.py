"""From the places that an indexer picks to slots."""

from __future__ import annotations

import triton
import triton.language as tl


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
    """result [T, topk]: the slot of each place in a token's row of the table, -1 of -1."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = column < topk
    place = tl.load(picks + token * picks_stride + column, mask=is_column, other=-1)
    row = tl.load(rows + token)
    slots = tl.load(table + row * table_width + place, mask=place >= 0, other=-1)
    tl.store(result + token * topk + column, slots, mask=is_column)
