"""The step of a batch's virtual requests: the tokens of a request in one chunk of its sequence.

They are a step's pieces. The largest possible number of pieces follows from shapes, so that nothing
is read on the host; surplus pieces are empty.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from attnmux.core.adapters.indices.ragged import cu_seqlens
from attnmux.core.adapters.indices.segments import segment_of_place
from attnmux.core.contract.batch import ForwardBatch


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
    """[P + 1] int32: where the queries of each piece begin; None if each has one. The last piece
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


def virtual_step(
    batch: ForwardBatch, chunk: int, *, table: torch.Tensor, engines: torch.Tensor
) -> ForwardBatch:
    """The step of a batch's virtual requests.

    table: [rows, width] int32, theirs. Row 1 + i of it gets the slots of virtual request i, by
    operations of static shape. engines: [rows, max_context] int32, the engine's table.
    """
    pieces, new = Pieces.of(batch, chunk), None
    count, on_host = min(len(pieces.rows), len(table) - 1), _on_host(batch, chunk)
    new_cpu = None
    if on_host is not None and on_host.query_bounds is not None:
        new_cpu = _new_tokens(on_host.query_bounds)
        # Empty pieces come last
        count = max(int((new_cpu > 0).sum()), 1)
    if pieces.query_bounds is not None:
        new = _new_tokens(pieces.query_bounds)[:count]
    lens, start = (pieces.ends - pieces.chunks * chunk)[:count], (pieces.chunks * chunk)[:count]
    _fill(table, engines, pieces.rows[:count], start, lens)
    lens_cpu = None
    if on_host is not None:
        lens_cpu = (on_host.ends - on_host.chunks * chunk)[:count]
        new_cpu = None if new_cpu is None else new_cpu[:count]
    return replace(
        batch,
        batch_size=count,
        req_pool_indices=torch.arange(1, count + 1, device=table.device),
        seq_lens=lens,
        positions=batch.positions % chunk,
        seq_lens_cpu=lens_cpu,
        seq_lens_sum=None if lens_cpu is None else int(lens_cpu.sum()),
        extend_seq_lens=new,
        extend_seq_lens_cpu=new_cpu,
        extend_prefix_lens=None if new is None else lens - new,
        extend_prefix_lens_cpu=None if lens_cpu is None or new_cpu is None else lens_cpu - new_cpu,
        tbo_children=(),
    )


def _on_host(batch: ForwardBatch, chunk: int) -> Pieces | None:
    """The pieces by the batch's mirrors; None if it lacks some."""
    lens, new, cached = batch.seq_lens_cpu, batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu
    is_decode = batch.forward_mode.is_decode()
    if lens is None or (not is_decode and (new is None or cached is None)):
        return None
    rows = torch.zeros(len(lens), dtype=torch.int64)
    mirrored = replace(
        batch,
        seq_lens=lens,
        extend_seq_lens=new,
        extend_prefix_lens=cached,
        req_pool_indices=rows,
    )
    return Pieces.of(mirrored, chunk)


def _new_tokens(query_bounds: torch.Tensor) -> torch.Tensor:
    """[P] int32: the last piece has none, since its queries belong to no request."""
    new = query_bounds.diff()
    new[-1:] = 0
    return new


def _fill(
    table: torch.Tensor,
    engines: torch.Tensor,
    rows: torch.Tensor,
    start: torch.Tensor,
    lens: torch.Tensor,
) -> None:
    """Write the slots of virtual requests, from row 1 of the table. rows, start, lens: [P]."""
    order = torch.arange(table.shape[1], device=table.device)
    columns = (start.unsqueeze(1) + order).clamp(max=engines.shape[1] - 1)
    slots = engines[rows.unsqueeze(1), columns]
    table[1 : len(rows) + 1] = slots.masked_fill_(order >= lens.unsqueeze(1), 0)
