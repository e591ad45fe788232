"""The keys that each of a token's three queries meets: a step's pieces, and their page tables.

A piece is the queries of one request in one chunk. Its keys are three ranges of the request's
sequence, one for each query.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from attnmux.core import InvalidInput
from attnmux.core.plugin import KeyGroup, Keys, Pieces, page_table

if TYPE_CHECKING:
    from attnmux.core import BackendContext, ForwardBatch, LayerSpec


def regions_of(pieces: Pieces) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
    """(start, length), [P] int32 each, of the keys that each query meets: those of its own
    chunk, of the chunk before, and all before that."""
    before = (pieces.chunks - 1).clamp_(min=0) * pieces.chunk_len
    starts = pieces.chunks * pieces.chunk_len
    return (
        (starts, pieces.ends - starts),
        (before, starts - before),
        (torch.zeros_like(before), before),
    )


def longest_keys(chunk_len: int, longest: int) -> tuple[int, ...]:
    """The most keys that each query meets in sequences of at most `longest` tokens.

    Queries that no such sequence needs are left out: in its first chunk, it needs one.
    """
    chunks_before = max(longest - 1, 0) // chunk_len
    most = (min(longest, chunk_len), chunk_len, (chunks_before - 1) * chunk_len)
    return most[: 1 + min(chunks_before, 2)]


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkGroup:
    """Layers whose keys are in the same places and in chunks of one length."""

    chunk_len: int
    keys: KeyGroup
    """Its pages have one token if a chunk may begin in mid-page: then tables name slots."""

    @classmethod
    def of(cls, layer: LayerSpec, context: BackendContext) -> ChunkGroup:
        keys = KeyGroup.of(layer, context)
        if layer.dual_chunk_len % keys.page_size:
            keys = replace(keys, page_size=1)
        return cls(chunk_len=layer.dual_chunk_len, keys=keys)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Regions:
    """The keys of a step's P pieces."""

    keys: tuple[Keys, ...]
    """Keys of the first query, and of the second and third if a sequence needs them."""
    query_bounds: torch.Tensor | None
    """See `Pieces`."""


def regions_in_pool(
    pieces: Pieces,
    group: ChunkGroup,
    context: BackendContext,
    *,
    longest: int,
    fixed: tuple[Keys, ...],
) -> Regions:
    """The regions of keys that the pool stores, by device operations of static shape.

    longest: the most keys of a request. fixed: the buffers that a graph replays with, or ().
    """
    widths = longest_keys(group.chunk_len, longest)
    regions = []
    for number, (width, (starts, lens)) in enumerate(zip(widths, regions_of(pieces), strict=False)):
        table = page_table(
            context.req_to_token_pool,
            pieces.rows,
            lens,
            page_size=group.keys.page_size,
            kv_start=starts,
            max_len=width,
        )
        keys = Keys(page_table=group.keys.translated(table, context), lens=lens)
        regions.append(keys.copied_to(fixed[number]) if fixed else keys)
    return Regions(keys=tuple(regions), query_bounds=pieces.query_bounds)


def regions_in_call(batch: ForwardBatch, chunk_len: int) -> Regions:
    """The regions of keys that come with an extend's call, as pages of one token.

    There is no prefix, whatever the batch says. Raises InvalidInput in decode.
    """
    if batch.extend_prefix_lens is not None:
        batch = replace(batch, extend_prefix_lens=torch.zeros_like(batch.extend_prefix_lens))
    pieces = Pieces.of(batch, chunk_len)
    bounds = pieces.query_bounds
    if bounds is None:
        raise InvalidInput("save_kv_cache", got=False, expected="True in decode")
    first_rows = bounds[:-1] - pieces.chunks * chunk_len
    regions = []
    widths = longest_keys(chunk_len, batch.num_tokens)
    for width, (starts, lens) in zip(widths, regions_of(pieces), strict=False):
        order = torch.arange(width, device=lens.device, dtype=torch.int32)
        table = (first_rows + starts).unsqueeze(1) + order
        table.masked_fill_(order >= lens.unsqueeze(1), 0)
        regions.append(Keys(page_table=table, lens=lens))
    return Regions(keys=tuple(regions), query_bounds=bounds)


def fixed_regions(
    group: ChunkGroup, max_batch_size: int, context: BackendContext
) -> tuple[Keys, ...]:
    """Fixed tensors for graphs of decode steps of up to `max_batch_size` requests."""
    return tuple(
        Keys.zeros(max_batch_size, -(-width // group.keys.page_size), context.device)
        for width in longest_keys(group.chunk_len, context.max_context_len)
    )
