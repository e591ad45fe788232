"""Tensors that steps share while they verify drafts of the same requests: rows, places, cells of
the table."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from attnmux.core import SpecInput
from attnmux.parts import DraftTree
from attnmux.transformers.requests.batching import StepBuilder
from attnmux.transformers.requests.sequence import SequenceState


class VerifyRows:
    """B requests in rows of the request table, with trees of d nodes each.

    Its tensors are made once, and serve for as long as the same requests verify drafts. The host
    knows the slots that the requests hold, so that a step costs one copy to the device. Wait for a
    step before the next.
    """

    def __init__(self, states: Sequence[SequenceState], width: int, steps: StepBuilder) -> None:
        """states: each has a row, and slots for its nodes. width: d."""
        self._states, self._rows = list(states), [state.row for state in states]
        self._width, device, num = width, steps.device, len(states)
        table, total = steps.req_to_token_pool.req_to_token, num * width
        self._table, self._nodes, rows = table.view(-1), np.arange(width), np.array(self._rows)
        self._first_cells = rows * table.shape[1]
        host = torch.from_numpy(np.concatenate([rows, np.arange(total)])).to(device)
        self.indices, self.order = host.split_with_sizes([num, total])
        """[B] int64, the rows; and [B * d] int64, the places of all nodes."""
        self.counts_cpu = torch.full((num,), width, dtype=torch.int32)
        self.chains = SpecInput(draft_token_num=width, topk=1)
        """`ForwardBatch.spec_info` if the trees are chains."""
        self.counts = self.counts_cpu.to(device)
        """[B] int32: d of each request."""
        sizes = [total] * 3 + [(num + 1) // 2]
        self._host = _pinned(sum(sizes), device)
        self._moved = torch.zeros_like(self._host, device=device)
        self.input_ids, self.positions, self.slots, lens = self._moved.split_with_sizes(sizes)
        """[B * d] int64"""
        self.lens = lens.view(torch.int32)[:num]
        """[B] int32: cached tokens."""
        self.lens_cpu = self._host[3 * total :].view(torch.int32)[:num]
        values = self._host.numpy()
        self._lens = self.lens_cpu.numpy()
        self._tokens, self._positions, self._places = values[: 3 * total].reshape(3, num, width)
        self.read_slots(wait=True)

    def read_slots(self, *, wait: bool) -> None:
        """Read the slots that the requests hold after their cached tokens.

        wait: for the device. Without it, they are there once the step that runs is over.
        """
        firsts = np.array([state.num_cached for state in self._states])
        held = np.array([state.num_held for state in self._states])
        num = int((held - firsts).max())
        columns = np.minimum(firsts[:, None] + np.arange(num), held[:, None] - 1)
        cells = torch.from_numpy(self._first_cells[:, None] + columns).to(self._table.device)
        # Pinned memory on the host, which the copy does not wait for
        slots = self._table.index_select(0, cells.view(-1)).to("cpu", non_blocking=not wait)
        self._held = slots.numpy()
        self._starts = np.arange(len(firsts)) * num - firsts
        """Added to a request's place, it gives an index of `_held`."""

    def serve(self, states: Sequence[SequenceState], width: int) -> bool:
        """Whether these are the requests, their rows and their d."""
        rows = [state.row for state in states]
        return width == self._width and self._rows == rows and self._states == states

    def place(self, prefixes: Sequence[int], tree: DraftTree, num_drafts: int) -> None:
        """Fill the tensors for a step.

        prefixes: cached tokens of each request. tree: of d nodes, its tokens and levels on the
        host. num_drafts: those that are no padding, for which the requests hold slots; padding has
        slot 0.
        """
        self._lens[:] = prefixes
        self._tokens[:] = tree.draft_tokens.numpy()
        lens = self._lens[:, None]
        levels = self._nodes if tree.visible is None else tree.depths.numpy()
        np.add(lens, levels, out=self._positions)
        cells = (self._lens + self._starts)[:, None] + self._nodes[:num_drafts]
        self._places[:, :num_drafts] = self._held[cells]
        self._places[:, num_drafts:] = 0
        self._moved.copy_(self._host, non_blocking=True)


def _pinned(size: int, device: torch.device) -> torch.Tensor:
    """[size] int64 on the host, pinned if the device can copy such memory."""
    try:
        return torch.empty(size, dtype=torch.int64, pin_memory=device.type != "cpu")
    except RuntimeError:
        return torch.empty(size, dtype=torch.int64)
