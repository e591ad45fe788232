"""A step's pieces: the queries of one request in one chunk of its sequence.

The largest possible number of pieces follows from shapes, so that nothing is read on the host;
surplus pieces are empty.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attnmux.core.indices._segments import segment_of_place
from attnmux.core.indices.ragged import cu_seqlens

if TYPE_CHECKING:
    from attnmux.core.batch import ForwardBatch


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
        new, cached = batch.extend_lens()
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


def most_pieces(batch: ForwardBatch, chunk_len: int) -> int:
    """The most pieces that an extend step can have, and one that is always empty.

    n consecutive tokens lie in at most 2 + n // chunk_len chunks.
    """
    return 2 * batch.batch_size + batch.num_tokens // chunk_len + 1
