"""Where the keys of a step are: in blocks, which is all that a tile reads.

A block holds keys of one request alone, since a kernel loads it whole and a hidden key's weight
of 0 does not silence a NaN. Pages of 16 keys or more are cut into blocks and read where they lie.
Keys on smaller pages, and those that come with the call, are gathered to blocks first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attnmux.core.indices import cu_seqlens
from attnmux.cpu.flex_attention.tiles import bucket

if TYPE_CHECKING:
    from attnmux.core.batch import ForwardBatch
    from attnmux.core.context import BackendContext
    from attnmux.cpu.steps import KeyRule, StepLens

LARGEST_BLOCK = 128
SMALLEST_BLOCK = 16
"""A tensor core's product has no fewer keys."""
GATHERED_BLOCK = 64
LEAST_CAPACITY = 1024
LEAST_LISTED = 128


def block_of_page(page_size: int) -> int:
    """Keys of the blocks that pages are cut into; 0 where pages are too small for it."""
    block = math.gcd(page_size, LARGEST_BLOCK)
    return block if block >= SMALLEST_BLOCK else 0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Keys:
    """The blocks of each request. Columns are places in the request's row of the table."""

    block: int
    start: torch.Tensor
    """[B] int64: the column of the first key in a request's first block."""
    table: torch.Tensor
    """[B, n] int64: each request's blocks in order; any block past its end."""
    columns: torch.Tensor
    """[capacity] int32: for each block, its first key's place behind `start`."""
    slots: torch.Tensor | None
    """[S] int64: what to gather, slots or rows of the call's k; None where nothing is."""
    listed: int
    """The most blocks that a tile can have, rounded up to a size to compile for."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Extent:
    """The columns of each request's keys that a step may read, [B] int64."""

    start: torch.Tensor
    stop: torch.Tensor

    @classmethod
    def of(cls, rule: KeyRule, lens: StepLens) -> Extent:
        """For in-call keys, a column is a key's place among the request's own."""
        if rule.is_cross:
            return cls(start=torch.zeros_like(lens.encoder), stop=lens.encoder)
        if rule.in_call:
            return cls(start=torch.zeros_like(lens.new), stop=lens.new)
        start = torch.zeros_like(lens.cached)
        if rule.window >= 0:
            start = lens.cached - rule.window
        if rule.chunk > 0:
            start = torch.maximum(start, lens.cached // rule.chunk * rule.chunk)
        # Without new tokens nothing is read, whatever is cached.
        stop = torch.where(lens.new > 0, lens.cached + lens.new, 0)
        return cls(start=start.clamp_(min=0) + lens.encoder, stop=stop + lens.encoder)


def listed_of(context: BackendContext, block: int) -> int:
    """`Keys.listed` of the pool's blocks."""
    return bucket(-(-context.req_to_token_pool.req_to_token.shape[1] // block), LEAST_LISTED)


def capacity_of(context: BackendContext, layer_id: int, block: int) -> int:
    """Length of `Keys.columns` for the pool's blocks and one place that is nobody's."""
    num_slots = context.token_to_kv_pool.get_key_buffer(layer_id).shape[0]
    return bucket(num_slots // block + 1, LEAST_CAPACITY)


def keys_on_pages(
    extent: Extent,
    layer_id: int,
    batch: ForwardBatch,
    context: BackendContext,
    *,
    width: int | None = None,
) -> Keys:
    """The pool's own blocks.

    width: blocks a request, at least as many as any has; without it a synchronisation finds it.
    Two requests that share a page must have it at one place of their rows, as a shared prefix is.
    """
    pool, table = context.token_to_kv_pool, context.req_to_token_pool.req_to_token
    block = block_of_page(pool.page_size)
    if width is None:
        width = max(1, -(-int(extent.stop.max()) // block))
    first = torch.arange(width, device=table.device) * block
    in_row = first.clamp(max=table.shape[1] - 1)
    slots = table[batch.req_pool_indices.unsqueeze(1), in_row]
    blocks = pool.translate(slots, layer_id).long() // block
    is_read = (first + block > extent.start.unsqueeze(1)) & (first < extent.stop.unsqueeze(1))
    # A table's stale entries must not move another request's block: the last place is nobody's.
    capacity = capacity_of(context, layer_id, block)
    columns = torch.empty(capacity, dtype=torch.int32, device=table.device)
    where = torch.where(is_read, blocks, capacity - 1)
    columns[where] = first.int().expand_as(where)
    return Keys(
        block=block,
        start=torch.zeros_like(extent.start),
        table=blocks,
        columns=columns,
        slots=None,
        listed=listed_of(context, block),
    )


def gathered_keys(
    extent: Extent, rule: KeyRule, layer_id: int, batch: ForwardBatch, context: BackendContext
) -> Keys:
    """Blocks of scratch, and which slots, or rows of the call's k, to fill them with.

    Synchronises on the number of blocks.
    """
    block, device = GATHERED_BLOCK, extent.start.device
    lens = (extent.stop - extent.start).clamp_(min=0)
    blocks = (lens + block - 1) // block
    indptr = cu_seqlens(blocks.int()).long()
    # Sizes 0 and 1 would be compiled apart from all others.
    total = max(2, int(indptr[-1]))
    width = max(1, int(blocks.max()))
    of_block = torch.searchsorted(indptr[1:], torch.arange(total, device=device), right=True)
    request = of_block.clamp_(max=lens.shape[0] - 1)
    in_request = (torch.arange(total, device=device) - indptr[request]) * block
    # Past a request's last key it comes again: finite, and its own.
    order = in_request.unsqueeze(1) + torch.arange(block, device=device)
    order = torch.minimum(order, lens[request].unsqueeze(1) - 1).clamp_(min=0)
    column = extent.start[request].unsqueeze(1) + order
    if rule.in_call:
        first_row = cu_seqlens(extent.stop.int()).long()
        slots = first_row[request].unsqueeze(1) + column
        # A block of nobody's, or of a request without keys, is listed for no tile.
        slots = torch.where(lens[request].unsqueeze(1) > 0, slots, 0)
    else:
        table = context.req_to_token_pool.req_to_token
        rows = batch.req_pool_indices[request].unsqueeze(1)
        slots = table[rows, column.clamp_(max=table.shape[1] - 1)]
        slots = context.token_to_kv_pool.translate(slots, layer_id).long()
    columns = torch.empty(bucket(total + 1, LEAST_CAPACITY), dtype=torch.int32, device=device)
    columns[:total] = in_request.int()
    table_of_blocks = indptr[:-1].unsqueeze(1) + torch.arange(width, device=device)
    return Keys(
        block=block,
        start=extent.start,
        table=table_of_blocks.clamp_(max=total - 1),
        columns=columns,
        slots=slots.flatten(),
        listed=bucket(width, LEAST_LISTED),
    )
