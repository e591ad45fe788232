"""Requests that decode together for many steps, with their batch kept on the device."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import torch

from attnmux.core import ForwardBatch, ForwardMode, InvalidInput
from attnmux.transformers.requests.request_memory import RequestMemory
from attnmux.transformers.requests.sequence import SequenceState, Step


class DecodeBatch:
    """Consecutive decode steps of the same requests.

    Rows, lengths and last slots are read from the requests once. A step then costs a few tensor
    operations for any number of requests, and sampled tokens stay on the device. Each request grows
    by one token a step, so that the steps in which it opens a page are known from the start.
    Make a new batch when a request leaves, joins or is extended.
    """

    def __init__(self, states: Sequence[SequenceState], memory: RequestMemory) -> None:
        """states: each has a row, one pending token, and room for that token in its context."""
        req_to_token_pool, allocator = memory.req_to_token_pool, memory.allocator
        self.states = tuple(states)
        self._memory = memory
        self._table = req_to_token_pool.req_to_token
        width, page_size = req_to_token_pool.max_context_len, allocator.page_size
        columns = [state.num_columns for state in states]
        self._steps_left = width - max(columns, default=0)
        in_page = [column % page_size for column in columns]
        order = sorted(range(len(states)), key=in_page.__getitem__)
        self._opening = _bounds([in_page[place] for place in order], page_size)
        self._phase = 0
        """Steps so far, modulo the page size."""
        host = torch.tensor(
            [
                [state.row for state in states],
                [state.num_cached for state in states],
                [state.token_ids[-1] for state in states],
                [state.encoder_len for state in states],
                columns,
                order,
                [state.position_delta for state in states],
            ]
        )
        device_rows = host.to(allocator.device).unbind()
        self._rows, positions, self._first_ids, encoder, starts, self._order, deltas = device_rows
        self._deltas = deltas if any(state.position_delta for state in states) else None
        self._lens = positions.to(torch.int32)
        self._lens_cpu = host[1].to(torch.int32)
        self._lens_sum = sum(state.num_cached for state in states)
        has_encoder = any(state.encoder_len for state in states)
        self._encoder_lens = encoder.to(torch.int32) if has_encoder else None
        last = self._table[self._rows, (starts - 1).clamp(min=0)].long()
        # One tensor, so that one operation advances all three: position, cell of the table, slot.
        self._places = torch.stack([positions - 1, self._rows * width + starts - 1, last])
        self._each = torch.arange(len(states), device=allocator.device)

    def step(self, token_ids: torch.Tensor | None = None) -> Step:
        """The next step, over the one pending token of each request.

        token_ids: [B] int64 on the device, the pending tokens; None reads them from the requests,
        in the first step. Raises PoolExhausted without enough slots, and InvalidInput if a context
        is full. An exception changes nothing.
        """
        if not self._steps_left:
            raise InvalidInput(
                "states", got="a request whose context is full", expected="room for one token each"
            )
        first, last = self._opening[self._phase]
        allocator = self._memory.allocator
        with self._memory.taking():
            pages = allocator.alloc_pages(last - first) if last > first else None
            places = self._places + 1
            positions, cells, slots = places.unbind()
            if allocator.page_size == 1 and pages is not None:
                slots = pages
            elif pages is not None:
                slots.index_copy_(0, self._order[first:last], pages * allocator.page_size)
            self._table.view(-1).index_copy_(0, cells, slots.to(self._table.dtype))
            lens, lens_cpu = self._lens + 1, self._lens_cpu + 1
            batch = ForwardBatch(
                forward_mode=ForwardMode.DECODE,
                batch_size=len(self.states),
                req_pool_indices=self._rows,
                seq_lens=lens,
                out_cache_loc=slots,
                positions=positions,
                seq_lens_cpu=lens_cpu,
                seq_lens_sum=self._lens_sum + len(self.states),
                encoder_lens=self._encoder_lens,
            )
        self._places, self._lens, self._lens_cpu = places, lens, lens_cpu
        self._lens_sum += len(self.states)
        self._phase = (self._phase + 1) % len(self._opening)
        self._steps_left -= 1
        for state in self.states:
            state.num_cached += 1
        self._memory.intact = True
        input_ids = self._first_ids if token_ids is None else token_ids
        return Step(
            batch=batch,
            input_ids=input_ids,
            last_indices=self._each,
            position_ids=None if self._deltas is None else positions + self._deltas,
        )


def _bounds(in_page: Sequence[int], page_size: int) -> list[tuple[int, int]]:
    """For each of page_size steps, the range of the ascending `in_page` that opens a page: step s
    is the first of a page if in_page + s = 0 modulo page_size."""
    ends = [bisect_right(in_page, place) for place in range(-1, page_size)]
    steps = range(page_size)
    return [(ends[-step % page_size], ends[-step % page_size + 1]) for step in steps]
