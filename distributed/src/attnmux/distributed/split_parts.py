"""The parts of a split step on one rank: keys that it reads at once, and the tokens that see them.

A rank's tokens see their own chunk causally. They see every earlier chunk and the cached prefix
completely, as cross attention does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, TypeAlias

import torch

from attnmux.core import ForwardBatch, ForwardMode
from attnmux.core.plugin import cu_seqlens, kv_indices
from attnmux.distributed.zigzag import ZigzagStep, spans
from attnmux.parts import KeyPart

if TYPE_CHECKING:
    from attnmux.core import RequestTable


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ChunkRows:
    """Keys of earlier chunks."""

    rows: slice | torch.Tensor
    """Rows of the gathered chunks."""
    chunks: int
    """How many of the step's chunks must have arrived."""


SplitKeys: TypeAlias = ChunkRows | torch.Tensor | None
"""Keys of earlier chunks, slots [n] int64 of the prefix, or None for the rank's own chunks."""


def parts_of(
    step: ZigzagStep, table: RequestTable, *, chunks_at_once: int, most_tokens: int
) -> Iterator[KeyPart[SplitKeys]]:
    """The rank's own chunks, then the cached prefix, then earlier chunks as they arrive; nothing on
    a rank without tokens.

    chunks_at_once: chunks of a round, in which they arrive together. most_tokens: keys of a part at
    most.
    """
    if not step.num_tokens:
        return
    yield _own_part(step)
    yield from _prefix_parts(step, table, most_tokens)
    first, second = step.own_chunks
    for start in range(0, second, chunks_at_once):
        end = start + chunks_at_once
        for halves, chunks in (
            ((0, 1), range(start, min(end, first))),
            ((1,), range(max(start, first), min(end, second))),
        ):
            if chunks:
                yield from _chunk_parts(step, halves, chunks, most_tokens)


def _own_part(step: ZigzagStep) -> KeyPart[SplitKeys]:
    lens = [length for chunk in step.own_chunks for length in step.chunk_lens[chunk]]
    tokens = slice(0, step.num_tokens)
    batch = _batch(step, step.req_pool_indices, tokens, lens, [0] * len(lens))
    return KeyPart(batch=batch, tokens=tokens, keys=None)


def _prefix_parts(
    step: ZigzagStep, table: RequestTable, most_tokens: int
) -> Iterator[KeyPart[SplitKeys]]:
    for first, starts, lens in KeyPart.chunks(step.cached_lens, most_tokens):
        device = step.req_pool_indices.device
        of_part = torch.tensor([starts, lens], dtype=torch.int32).to(device)
        slots = kv_indices(
            table,
            step.req_pool_indices[first : first + len(lens)],
            cu_seqlens(of_part[1]),
            kv_start=of_part[0],
            total=sum(lens),
        )
        yield from _parts_on(step, slots.long(), (0, 1), first, lens)


def _chunk_parts(
    step: ZigzagStep, halves: Sequence[int], chunks: range, most_tokens: int
) -> Iterator[KeyPart[SplitKeys]]:
    """The keys of some chunks, for both halves of the rank's tokens or for the second alone."""
    all_lens = torch.tensor(step.chunk_lens).view(len(step.chunk_lens), -1)
    ends = all_lens.flatten().cumsum(0).view(all_lens.shape)
    # Request by request, and each request's chunks in turn
    lens, starts = (tensor[chunks].T for tensor in (all_lens, ends - all_lens))
    rows, done = spans(starts.flatten(), lens.flatten()), 0
    is_range = len(chunks) == 1 or step.num_requests == 1
    for first, _, key_lens in KeyPart.chunks(lens.sum(1).tolist(), most_tokens):
        chunk_rows = rows[done : done + sum(key_lens)]
        done += len(chunk_rows)
        some = slice(int(chunk_rows[0]), int(chunk_rows[-1]) + 1)
        keys = ChunkRows(
            rows=some if is_range else chunk_rows.to(step.order.device), chunks=chunks.stop
        )
        yield from _parts_on(step, keys, halves, first, key_lens)


def _parts_on(
    step: ZigzagStep, keys: SplitKeys, halves: Sequence[int], first: int, key_lens: Sequence[int]
) -> Iterator[KeyPart[SplitKeys]]:
    """One part on the keys of requests `first`, `first + 1`, … for each half of the rank's tokens.

    A single request's halves lie next to each other and make one part.
    """
    lens = [step.chunk_lens[step.own_chunks[half]] for half in halves]
    begin = 0 if 0 in halves else sum(step.chunk_lens[step.rank])
    if step.num_requests == 1:
        lens = [(sum(length for (length,) in lens),)]
    for length in lens:
        places = [begin, *(begin + end for end in accumulate(length))]
        begin = places[-1]
        last = first + len(key_lens)
        tokens = slice(places[first], places[last])
        if tokens.start < tokens.stop:
            rows = step.req_pool_indices[first:last]
            batch = _batch(step, rows, tokens, length[first:last], key_lens)
            yield KeyPart(batch=batch, tokens=tokens, keys=keys)


def _batch(
    step: ZigzagStep,
    rows: torch.Tensor,
    tokens: slice,
    lens: Sequence[int],
    key_lens: Sequence[int],
) -> ForwardBatch:
    """lens, key_lens: new tokens of each request, and the keys that it sees as an encoder's."""
    on_host = torch.tensor([lens, [0] * len(lens), key_lens], dtype=torch.int32)
    new, cached, encoder = on_host.to(rows.device)
    return ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        batch_size=len(lens),
        req_pool_indices=rows,
        seq_lens=new,
        out_cache_loc=step.out_cache_loc[tokens],
        positions=step.positions[tokens],
        seq_lens_cpu=on_host[0],
        seq_lens_sum=sum(lens),
        extend_seq_lens=new,
        extend_seq_lens_cpu=on_host[0],
        extend_prefix_lens=cached,
        extend_prefix_lens_cpu=on_host[1],
        extend_num_tokens=sum(lens),
        encoder_lens=encoder,
        encoder_out_cache_loc=step.out_cache_loc[:0],
    )
