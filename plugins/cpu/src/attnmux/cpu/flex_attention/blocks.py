"""A step's queries in tiles, its keys in blocks, and the blocks that each tile reads.

A tile holds queries of one request and is the batch dimension of the compiled kernel. A block holds
keys of one request only: a kernel loads it whole, and a hidden key's weight of 0 does not silence a
NaN. Pages of 16 keys or more are cut into blocks and read in place. Keys on smaller pages, and the
call's own keys, are first gathered into blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attnmux.core.plugin import cu_seqlens
from attnmux.cpu.steps import draft_keys, mask_starts

if TYPE_CHECKING:
    from attnmux.core import BackendContext, ForwardBatch
    from attnmux.cpu.steps import KeyRule, StepLens

LARGEST_BLOCK = 128
SMALLEST_BLOCK = 16
"""A tensor core's product has no fewer keys."""
GATHERED_BLOCK = 64
LEAST_CAPACITY = 1024
LEAST_LISTED = 128
LEAST_MASK = 1 << 16


def least_tiles(size: int) -> int:
    """The smallest bucket of tiles. Shorter steps run idle tiles, which cost little."""
    return 8 if size == 1 else 16


def bucket(number: int, least: int) -> int:
    """The next power of two, to which sizes are rounded up so that few are compiled."""
    return max(least, 1 << max(number - 1, 0).bit_length())


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Tiles:
    """N tiles of up to `size` queries, each of one request. Tiles past the last are idle.

    N follows from T and B, so making tiles does not wait for the device.
    """

    size: int
    request: torch.Tensor
    """[N] int64: the tile's request; for an idle tile the last request."""
    order: torch.Tensor
    """[N, size] int64: the query's place among its request's new tokens."""
    is_real: torch.Tensor
    """[N, size] bool: whether the query exists."""
    tokens: torch.Tensor
    """[N, size] int64: the query's row in q; any row if it does not exist."""
    places: torch.Tensor
    """[T] int64: each row's place among the N * size queries."""

    @property
    def count(self) -> int:
        return self.request.shape[0]


def tile_count(num_tokens: int, batch_size: int, size: int) -> int:
    """N of a step of this size; no shorter step has more."""
    # Every tile has at least one token, and each request has at most one tile that is not full.
    return bucket(min(num_tokens, num_tokens // size + batch_size), least_tiles(size))


def make_tiles(lens: StepLens, num_tokens: int, size: int) -> Tiles:
    """Cut `num_tokens` > 0 rows of q into tiles. Padding rows get any place."""
    count, device = tile_count(num_tokens, lens.new.shape[0], size), lens.new.device
    first_token = cu_seqlens(lens.new.int()).long()
    first_tile = cu_seqlens(((lens.new + size - 1) // size).int()).long()
    tile = torch.arange(count, device=device)
    request = _segment(first_tile, tile)
    order = ((tile - first_tile[request]) * size).unsqueeze(1) + torch.arange(size, device=device)
    is_real = (order < lens.new[request].unsqueeze(1)) & (tile < first_tile[-1]).unsqueeze(1)
    tokens = (first_token[request].unsqueeze(1) + order).clamp_(max=num_tokens - 1)
    token = torch.arange(num_tokens, device=device)
    owner = _segment(first_token, token)
    in_request = token - first_token[owner]
    places = (first_tile[owner] * size + in_request).clamp_(max=count * size - 1)
    return Tiles(
        size=size, request=request, order=order, is_real=is_real, tokens=tokens, places=places
    )


def _segment(starts: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """The segment, of [B + 1] starts, that each place is in; the last one past the end."""
    segments = torch.searchsorted(starts[1:], places, right=True)
    return segments.clamp_(max=starts.shape[0] - 2)


def block_of_page(page_size: int) -> int:
    """Keys in each block that a page is cut into; 0 if pages are too small."""
    block = math.gcd(page_size, LARGEST_BLOCK)
    return block if block >= SMALLEST_BLOCK else 0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Keys:
    """The blocks of each request. A column is a place in the request's row of the table."""

    block: int
    start: torch.Tensor
    """[B] int64: the column of the first key in a request's first block."""
    table: torch.Tensor
    """[B, n] int64: each request's blocks in order, then any blocks."""
    columns: torch.Tensor
    """[capacity] int32: for each block, the column of its first key minus `start`."""
    slots: torch.Tensor | None
    """[S] int64: slots, or rows of the call's k, to gather; None if nothing is gathered."""
    listed: int
    """The most blocks of any tile, rounded up to a bucket."""


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
    return bucket(-(-context.req_to_token_pool.max_context_len // block), LEAST_LISTED)


def capacity_of(context: BackendContext, layer_id: int, block: int) -> int:
    """Length of `Keys.columns` for the pool's blocks and one unused place."""
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

    width: an upper bound of a request's blocks; without it, finding the maximum synchronises.
    Two requests that share a page must hold it at the same column, as a shared prefix does.
    """
    pool = context.token_to_kv_pool
    block = block_of_page(pool.page_size)
    table, tokens = context.req_to_token_pool.columns_for(block)
    if width is None:
        width = max(1, -(-int(extent.stop.max()) // block))
    first = torch.arange(width, device=table.device) * block
    in_row = (first // tokens).clamp(max=table.shape[1] - 1)
    slots = table[batch.req_pool_indices.unsqueeze(1), in_row] * tokens
    blocks = pool.translate(slots, layer_id).long() // block
    is_read = (first + block > extent.start.unsqueeze(1)) & (first < extent.stop.unsqueeze(1))
    # Stale entries of the table, which may name another request's blocks, go to the unused place.
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
    """Blocks of scratch, and the slots, or rows of the call's k, to gather into them.

    Synchronises to read the number of blocks.
    """
    block, device = GATHERED_BLOCK, extent.start.device
    lens = (extent.stop - extent.start).clamp_(min=0)
    blocks = (lens + block - 1) // block
    indptr = cu_seqlens(blocks.int()).long()
    # torch.compile specialises on sizes 0 and 1.
    total = max(2, int(indptr[-1]))
    width = max(1, int(blocks.max()))
    of_block = torch.searchsorted(indptr[1:], torch.arange(total, device=device), right=True)
    request = of_block.clamp_(max=lens.shape[0] - 1)
    in_request = (torch.arange(total, device=device) - indptr[request]) * block
    # The rest of a request's last block repeats its last key, which is finite.
    order = in_request.unsqueeze(1) + torch.arange(block, device=device)
    order = torch.minimum(order, lens[request].unsqueeze(1) - 1).clamp_(min=0)
    column = extent.start[request].unsqueeze(1) + order
    if rule.in_call:
        first_row = cu_seqlens(extent.stop.int()).long()
        slots = first_row[request].unsqueeze(1) + column
        # No tile lists an unused block, or one of a request without keys.
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


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Ranges:
    """The keys that the queries of N tiles see."""

    first: torch.Tensor
    """[N, size] int32: the first column in range."""
    end: torch.Tensor
    """[N, size] int32: one past the last column; 0 for a query without keys."""
    place: torch.Tensor | None
    """[N, size] int32: the query's own column; None under causality, where it is the last."""
    hidden: tuple[torch.Tensor, torch.Tensor] | None
    """Columns between the two [N, size] int32 are hidden: the end of the shared prefix, and
    the start of the query's own item."""
    mask: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None
    """A flat mask, padded; [N, size] int64, the place of each query's column 0, which may lie
    before it; and [N, size] int32, the first column that it covers. All before it are visible."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BlockLists:
    """The blocks of each tile, [N, w] int64, and how many of them are used, [N] int32."""

    partial: torch.Tensor
    num_partial: torch.Tensor
    whole: torch.Tensor | None
    """Blocks that every query of the tile sees whole; None if they are among the partial ones."""
    num_whole: torch.Tensor | None


def ranges(rule: KeyRule, batch: ForwardBatch, lens: StepLens, tiles: Tiles, keys: Keys) -> Ranges:
    """The keys that each query sees under a rule.

    Raises InvalidInput for a custom mask whose size is not that of the step.
    """
    cached = torch.zeros_like(lens.cached) if rule.in_call else lens.cached
    num_keys = lens.encoder if rule.is_cross else cached + lens.new
    # The column of key 0: after the encoder's keys in the row, except for the call's own keys.
    base = -keys.start
    if not rule.is_cross and not rule.in_call:
        base = base + lens.encoder

    def of_tiles(values: torch.Tensor) -> torch.Tensor:
        return values[tiles.request].unsqueeze(1)

    position = of_tiles(cached) + tiles.order
    keep = None if batch.spec_info is None or rule.is_cross else batch.spec_info.custom_mask
    items = None if rule.is_cross else batch.multi_item
    num_seen = of_tiles(num_keys).expand_as(position)
    first, end = rule.bounds(position, num_seen, masked=keep is not None)
    base = of_tiles(base)
    drafts = draft_keys(rule, batch)
    if drafts is not None:
        width = drafts.visible.shape[1]
        order = tiles.order.clamp(max=width - 1)
        first, end = drafts.first[tiles.request.unsqueeze(1), order], num_seen
    sees = tiles.is_real & (end > first)
    hidden = mask = None
    if items is not None:
        item_start = position - items.token_pos_in_items[tiles.tokens]
        prefix_end = of_tiles(items.prefix_lens.long()).expand_as(position)
        hidden = (prefix_end + base).int(), (item_start + base).int()
    if keep is not None:
        rows = mask_starts(keep, lens.new, num_keys)
        row = of_tiles(rows) + tiles.order * of_tiles(num_keys)
        mask = _with_room(keep), row - base, torch.zeros_like(row, dtype=torch.int32)
    if drafts is not None:
        row = (tiles.request.unsqueeze(1) * width + order) * width - of_tiles(cached)
        start = (of_tiles(cached) + base).expand_as(row)
        mask = _with_room(drafts.visible.flatten()), row - base, start.int()
    return Ranges(
        first=torch.where(sees, first + base, 0).int(),
        end=torch.where(sees, end + base, 0).int(),
        place=None if rule.is_causal or rule.is_cross else (position + base).int(),
        hidden=hidden,
        mask=mask,
    )


def block_lists(seen: Ranges, tiles: Tiles, keys: Keys, *, split: bool) -> BlockLists:
    """The blocks that hold a key of any query's range.

    split: list the blocks that need no mask separately.
    """
    block, width = keys.block, keys.table.shape[1]
    sees = seen.end > 0
    far = torch.iinfo(torch.int32).max
    low = torch.where(sees, seen.first, far).amin(1) // block
    high = (seen.end.amax(1) + block - 1) // block
    low = torch.minimum(low, high)
    table = keys.table[tiles.request]
    order = torch.arange(width, device=table.device)
    if not split or seen.hidden is not None or seen.mask is not None:
        listed = (low.unsqueeze(1) + order).clamp_(max=width - 1)
        return BlockLists(
            partial=table.gather(1, listed), num_partial=high - low, whole=None, num_whole=None
        )
    # Queries that do not exist may see anything; those without keys see no block whole.
    whole_from = (torch.where(tiles.is_real, seen.first, 0).amax(1) + block - 1) // block
    whole_to = torch.where(tiles.is_real, seen.end, far).amin(1) // block
    whole_from = torch.minimum(torch.maximum(whole_from, low), high)
    whole_to = torch.minimum(torch.maximum(whole_to, whole_from), high)
    num_before = (whole_from - low).unsqueeze(1)
    after = whole_to.unsqueeze(1) + order - num_before
    listed = torch.where(order < num_before, low.unsqueeze(1) + order, after)
    whole = (whole_from.unsqueeze(1) + order).clamp_(max=width - 1)
    return BlockLists(
        partial=table.gather(1, listed.clamp_(max=width - 1)),
        num_partial=high - low - (whole_to - whole_from),
        whole=table.gather(1, whole),
        num_whole=whole_to - whole_from,
    )


def _with_room(keep: torch.Tensor) -> torch.Tensor:
    """The mask, padded to a bucket: the kernel is compiled for its size."""
    roomy = torch.zeros(bucket(keep.shape[0], LEAST_MASK), dtype=torch.bool, device=keep.device)
    roomy[: keep.shape[0]] = keep
    return roomy
