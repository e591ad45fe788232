"""What steps that verify drafts of the same requests share: rows, places, cells of the table."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from attnmux.core import DraftTree
from attnmux.transformers.batching import StepBuilder
from attnmux.transformers.sequence import SequenceState


class VerifyRows:
    """B requests in rows of the request table, with trees of d nodes each.

    Its tensors are made once, and serve for as long as the same requests verify drafts. A step then
    costs one copy to the device, and a look-up of its slots. Wait for a step before the next.
    """

    def __init__(self, states: Sequence[SequenceState], width: int, steps: StepBuilder) -> None:
        """states: each has a row. width: d."""
        self._states, self._rows = list(states), [state.row for state in states]
        self._width, device, num = width, steps.device, len(states)
        table, total = steps.req_to_token_pool.req_to_token, num * width
        self._table = table.view(-1)
        nodes, rows = np.arange(width), np.array(self._rows)
        firsts = np.stack([np.zeros_like(rows), rows * table.shape[1]])
        self._offsets = firsts[:, :, None] + nodes
        """[2, B, d]: what a position and a cell of the table add to the cached tokens."""
        host = torch.from_numpy(np.concatenate([rows, np.arange(total)])).to(device)
        self.indices, self.order = host.split_with_sizes([num, total])
        """[B] int64, the rows; and [B * d] int64, the places of all nodes."""
        self.counts_cpu = torch.full((num,), width, dtype=torch.int32)
        self.counts = self.counts_cpu.to(device)
        """[B] int32: d of each request."""
        sizes = [total] * 3 + [(num + 1) // 2]
        self._host = _pinned(sum(sizes), device)
        self._moved = torch.zeros_like(self._host, device=device)
        self.input_ids, self.positions, self._cells, lens = self._moved.split_with_sizes(sizes)
        """[B * d] int64"""
        self.lens = lens.view(torch.int32)[:num]
        """[B] int32: cached tokens."""
        self.lens_cpu = self._host[3 * total :].view(torch.int32)[:num]
        values = self._host.numpy()
        self._tokens, self._lens = values[:total].reshape(num, width), self.lens_cpu.numpy()
        self._places = values[total : 3 * total].reshape(2, num, width)

    def serve(self, states: Sequence[SequenceState], width: int) -> bool:
        """Whether these are the requests, their rows and their d."""
        rows = [state.row for state in states]
        return width == self._width and self._rows == rows and self._states == states

    def place(self, prefixes: Sequence[int], tree: DraftTree, num_drafts: int) -> torch.Tensor:
        """Fill the tensors for a step. Returns its slots, [B * d] int64.

        prefixes: cached tokens of each request. tree: of d nodes, its tokens and levels on the
        host. num_drafts: those that are no padding, whose slots the table has; padding has slot 0.
        """
        self._lens[:] = prefixes
        self._tokens[:] = tree.draft_tokens.numpy()
        lens = self._lens[:, None]
        np.add(self._offsets, lens, out=self._places)
        if tree.visible is not None:
            np.add(tree.depths.numpy(), lens, out=self._places[0])
        if num_drafts < self._width:
            self._places[1, :, num_drafts:] = 0  # row 0 is that of padding
        self._moved.copy_(self._host, non_blocking=True)
        return self._table.index_select(0, self._cells).long()


def _pinned(size: int, device: torch.device) -> torch.Tensor:
    """[size] int64 on the host, pinned where the device can copy such memory."""
    try:
        return torch.empty(size, dtype=torch.int64, pin_memory=device.type != "cpu")
    except RuntimeError:
        return torch.empty(size, dtype=torch.int64)
