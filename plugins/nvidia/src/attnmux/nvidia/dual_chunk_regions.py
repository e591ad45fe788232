"""The keys that each of a token's three queries meets: a step's pieces, and their page tables.

A piece is the queries of one request in one chunk. Its keys are three ranges of the request's
sequence, one for each query. The largest possible number of pieces follows from shapes, so that
nothing is read on the host; surplus pieces are empty.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from attnmux.core import InvalidInput, KeyGroup, Keys, cu_seqlens, page_table, segment_of_place

if TYPE_CHECKING:
    from attnmux.core import BackendContext, ForwardBatch, LayerSpec


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Pieces:
    """P pieces, in the order of the step's tokens."""

    chunk_len: int
    rows: torch.Tensor
    """[P] int64: rows of the request table; row 0 for an empty piece."""
    chunks: torch.Tensor
    """[P] int32: the chunk of each piece."""
    ends: torch.Tensor
    """[P] int32: keys up to and including the last query of each piece; 0 for an empty piece."""
    query_bounds: torch.Tensor | None = None
    """[P + 1] int32: where the queries of each piece begin; None where each has one. The last piece
    belongs to no request: it takes the tokens after those of all requests."""

    @classmethod
    def of(cls, batch: ForwardBatch, chunk_len: int) -> Pieces:
        """By device operations of static shape. Raises InvalidInput for an extend step without
        lengths."""
        if batch.forward_mode.is_decode():
            chunks = (batch.seq_lens - 1).clamp_(min=0) // chunk_len
            return cls(
                chunk_len=chunk_len,
                rows=batch.req_pool_indices,
                chunks=chunks,
                ends=batch.seq_lens,
            )
        new, cached = batch.extend_seq_lens, batch.extend_prefix_lens
        if new is None or cached is None:
            raise InvalidInput("extend_seq_lens", got=None, expected="lengths in an extend step")
        first = cached // chunk_len
        last = (cached + new - 1) // chunk_len
        bounds = cu_seqlens((last - first + 1).masked_fill_(new == 0, 0).int())

        order = torch.arange(most_pieces(batch, chunk_len), device=new.device, dtype=torch.int32)
        request = segment_of_place(bounds, len(order))
        is_empty = request == batch.batch_size

        def by_piece(values: torch.Tensor) -> torch.Tensor:
            return torch.cat([values, values.new_zeros(1)])[request]

        chunks = (by_piece(first) + order - bounds[request]).masked_fill_(is_empty, 0)
        begins = torch.maximum(chunks * chunk_len, by_piece(cached))
        ends = torch.minimum((chunks + 1) * chunk_len, by_piece(cached + new))
        query_bounds = cu_seqlens((ends - begins).masked_fill_(is_empty, 0))
        query_bounds[-1:].fill_(batch.num_tokens)
        return cls(
            chunk_len=chunk_len,
            rows=by_piece(batch.req_pool_indices),
            chunks=chunks,
            ends=ends.masked_fill_(is_empty, 0),
            query_bounds=query_bounds,
        )

    def keys(self) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
        """(start, length), [P] int32 each, of the keys that each query meets: those of its own
        chunk, of the chunk before, and all before that."""
        before = (self.chunks - 1).clamp_(min=0) * self.chunk_len
        own = self.chunks * self.chunk_len
        return (
            (own, self.ends - own),
            (before, own - before),
            (torch.zeros_like(before), before),
        )


def most_pieces(batch: ForwardBatch, chunk_len: int) -> int:
    """The most pieces that an extend step can have, and one that is always empty.

    n consecutive tokens lie in at most 2 + n // chunk_len chunks.
    """
    return 2 * batch.batch_size + batch.num_tokens // chunk_len + 1


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
    """Its pages have one token where a chunk may begin in mid-page: then tables name slots."""

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
    """Those of the first query, and of the second and third where a sequence needs them."""
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
    for number, (width, (starts, lens)) in enumerate(zip(widths, pieces.keys(), strict=False)):
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
    for width, (starts, lens) in zip(widths, pieces.keys(), strict=False):
        order = torch.arange(width, device=lens.device, dtype=torch.int32)
        table = (first_rows + starts).unsqueeze(1) + order
        table.masked_fill_(order >= lens.unsqueeze(1), 0)
        regions.append(Keys(page_table=table, lens=lens))
    return Regions(keys=tuple(regions), query_bounds=bounds)


def fixed_regions(
    group: ChunkGroup, max_batch_size: int, context: BackendContext
) -> tuple[Keys, ...]:
    """What graphs of decode steps of up to `max_batch_size` requests replay with."""
    return tuple(
        Keys.zeros(max_batch_size, -(-width // group.keys.page_size), context.device)
        for width in longest_keys(group.chunk_len, context.max_context_len)
    )
