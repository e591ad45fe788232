"""Requests that decode together step after step, with what their steps need kept on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attnmux.core.batch import ForwardBatch, ForwardMode
from attnmux.core.kv import PagedAllocator, ReqToTokenPool
from attnmux.transformers.sequence import SequenceState, Step


class DecodeBatch:
    """The decode steps of the same requests, one after the other.

    Rows, lengths and last slots are read from the requests once; a step then costs a few tensor
    operations whatever the number of requests, and the sampled tokens need not pass by the host.
    It holds as long as its requests are in no other step: make a new one when one of them leaves,
    joins or is extended.
    """

    def __init__(
        self,
        states: Sequence[SequenceState],
        req_to_token_pool: ReqToTokenPool,
        allocator: PagedAllocator,
    ) -> None:
        """states: each has a row, one pending token, and room for it in its context."""
        self.states = tuple(states)
        self._table = req_to_token_pool
        self._allocator = allocator
        host = torch.tensor(
            [
                [state.row for state in states],
                [state.num_cached for state in states],
                [state.token_ids[-1] for state in states],
                [state.encoder_len for state in states],
            ]
        )
        device = allocator.device
        self._rows, cached, self._first_ids, encoder = host.to(device).unbind()
        self._lens = cached.to(torch.int32)
        self._lens_cpu = host[1].to(torch.int32)
        self._lens_sum = int(host[1].sum())
        columns = cached + encoder
        self._last_loc = req_to_token_pool.req_to_token[self._rows, (columns - 1).clamp(min=0)]
        has_encoder = any(state.encoder_len for state in states)
        self._encoder_lens = encoder.to(torch.int32) if has_encoder else None
        self._encoder_lens_cpu = host[3].to(torch.int32)
        self._each = torch.arange(len(states), device=device)

    def step(self, token_ids: torch.Tensor | None = None) -> Step:
        """The next step, over the one pending token of each request.

        token_ids: [B] int64 on the device, the pending tokens; None reads them from the requests,
        which is for the first step. Raises PoolExhausted, changing nothing, without enough slots.
        """
        positions = self._lens.long()
        lens, lens_cpu = self._lens + 1, self._lens_cpu + 1
        slots = self._allocate(positions, lens, lens_cpu)
        self._lens, self._lens_cpu, self._last_loc = lens, lens_cpu, slots
        self._lens_sum += len(self.states)
        for state in self.states:
            state.num_cached += 1
        batch = ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            batch_size=len(self.states),
            req_pool_indices=self._rows,
            seq_lens=lens,
            out_cache_loc=slots,
            positions=positions,
            seq_lens_cpu=lens_cpu,
            seq_lens_sum=self._lens_sum,
            encoder_lens=self._encoder_lens,
        )
        input_ids = self._first_ids if token_ids is None else token_ids
        return Step(batch=batch, input_ids=input_ids, last_indices=self._each)

    def _allocate(
        self, positions: torch.Tensor, lens: torch.Tensor, lens_cpu: torch.Tensor
    ) -> torch.Tensor:
        """Slots [B] of the new tokens, written to the table behind the encoder's."""
        if self._encoder_lens is not None:
            positions = positions + self._encoder_lens
            lens, lens_cpu = lens + self._encoder_lens, lens_cpu + self._encoder_lens_cpu
        slots = self._allocator.alloc_decode(lens, self._last_loc, seq_lens_cpu=lens_cpu)
        self._table.write(self._rows, positions, None, slots)
        return slots
