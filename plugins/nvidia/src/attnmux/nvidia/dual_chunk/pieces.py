"""A step's queries cut into pieces, each of one request and one chunk.

The keys of a piece are three ranges of its request's sequence, one for each of the three queries of
a token. How many pieces there are at most follows from shapes, so that nothing is read on the host;
those that are too many are empty.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attnmux.core.batch import ForwardBatch
from attnmux.core.errors import InvalidInput
from attnmux.core.indices import cu_seqlens, segment_of_place


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Pieces:
    """P pieces, in the order of the step's tokens."""

    chunk_len: int
    rows: torch.Tensor
    """[P] int64, of the request table; row 0 of an empty piece."""
    chunks: torch.Tensor
    """[P] int32: the chunk of each piece."""
    ends: torch.Tensor
    """[P] int32: keys up to the last query of each piece, itself included; 0 of an empty piece."""
    query_bounds: torch.Tensor | None = None
    """[P + 1] int32: where the queries of each piece begin; None for one query each. The last piece
    is never a request's: tokens behind those of all requests are its."""

    @classmethod
    def of(cls, batch: ForwardBatch, chunk_len: int) -> Pieces:
        """By device operations of static shape. Raises InvalidInput without an extend's lengths."""
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
            raise InvalidInput("extend_seq_lens", came=None, expected="lengths in an extend step")
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
        """(start, length), [P] int32 each, of the keys that each of the three queries meets: those
        of its own chunk, of the chunk before, and all before that."""
        before = (self.chunks - 1).clamp_(min=0) * self.chunk_len
        own = self.chunks * self.chunk_len
        return (
            (own, self.ends - own),
            (before, own - before),
            (torch.zeros_like(before), before),
        )


def most_pieces(batch: ForwardBatch, chunk_len: int) -> int:
    """Pieces that an extend step has at most, and one that is always empty.

    n tokens in a row lie in no more than 2 + n // chunk_len chunks.
    """
    return 2 * batch.batch_size + batch.num_tokens // chunk_len + 1


def longest_keys(chunk_len: int, longest: int) -> tuple[int, ...]:
    """Keys that each query meets at most, in a sequence of at most `longest` tokens. Only as many
    queries as such a sequence has use for: in its first chunk, one."""
    chunks_before = max(longest - 1, 0) // chunk_len
    most = (min(longest, chunk_len), chunk_len, (chunks_before - 1) * chunk_len)
    return most[: 1 + min(chunks_before, 2)]
