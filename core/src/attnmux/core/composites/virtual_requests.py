"""The step of a batch's virtual requests: the tokens of a request in one chunk of its sequence."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from attnmux.core.batch import ForwardBatch
from attnmux.core.composites.chunk_pieces import Pieces


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepBuffers:
    """What graphs of decode steps over virtual requests read, [max_bs]."""

    rows: torch.Tensor
    lens: torch.Tensor
    positions: torch.Tensor

    @classmethod
    def of(cls, max_bs: int, device: torch.device) -> StepBuffers:
        return cls(
            rows=torch.arange(1, max_bs + 1, device=device),
            lens=torch.ones(max_bs, dtype=torch.int32, device=device),
            positions=torch.zeros(max_bs, dtype=torch.int64, device=device),
        )


def in_buffers(step: ForwardBatch, each: Iterable[StepBuffers]) -> ForwardBatch:
    """A decode step in the first buffers with room: at capture and at every replay. Without room it
    stays where it is."""
    size = step.batch_size
    buffers = next((one for one in each if size <= len(one.rows)), None)
    if buffers is None:
        return step
    return replace(
        step,
        req_pool_indices=buffers.rows[:size],
        seq_lens=buffers.lens[:size].copy_(step.seq_lens),
        positions=buffers.positions[:size].copy_(step.positions),
    )


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
    """The pieces by the batch's mirrors; None where it lacks some."""
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
