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

    Rows, counts and places stay on the device while the same requests verify drafts. A step then
    costs one copy to the device, and a look-up of its slots.
    """

    def __init__(self, states: Sequence[SequenceState], width: int, steps: StepBuilder) -> None:
        """states: each has a row. width: d."""
        self._states, self._rows = list(states), [state.row for state in states]
        num, table = len(states), steps.req_to_token_pool.req_to_token
        self._width, self._device, self._table = width, steps.device, table.view(-1)
        nodes, rows = np.arange(width), np.array(self._rows)
        firsts = np.stack([np.zeros_like(rows), rows * table.shape[1]])
        self._offsets = firsts[:, :, None] + nodes
        """[2, B, d]: what a position and a cell of the table add to the cached tokens."""
        self._sizes = [num * width] * 3 + [(num + 1) // 2]
        host = torch.from_numpy(np.concatenate([rows, np.arange(num * width)]))
        self.indices, self.order = host.to(self._device).split_with_sizes([num, num * width])
        """[B] int64, the rows; and [B * d] int64, the places of all nodes."""
        self.counts_cpu = torch.full((num,), width, dtype=torch.int32)
        self.counts = self.counts_cpu.to(self._device)
        """[B] int32: d of each request."""

    def serve(self, states: Sequence[SequenceState], width: int) -> bool:
        """Whether these are the requests, their rows and their d."""
        rows = [state.row for state in states]
        return width == self._width and self._rows == rows and self._states == states

    def place(
        self, prefixes: Sequence[int], tree: DraftTree, num_drafts: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """A step's tokens, positions and slots, [B * d] int64 each, and cached tokens [B] int32.

        prefixes: cached tokens of each request. tree: of d nodes, its tokens and levels on the
        host. num_drafts: those that are no padding, whose slots the table has; padding has slot 0.
        """
        num, width = len(prefixes), self._width
        total = num * width
        host = np.empty(sum(self._sizes), np.int64)
        host[:total] = tree.draft_tokens.numpy().ravel()
        lens = host[3 * total :].view(np.int32)[:num]
        lens[:] = prefixes
        values = host[total : 3 * total].reshape(2, num, width)
        np.add(self._offsets, lens[:, None], out=values)
        if tree.visible is not None:
            np.add(tree.depths.numpy(), lens[:, None], out=values[0])
        if num_drafts < width:
            values[1, :, num_drafts:] = 0  # row 0 is that of padding
        moved = torch.from_numpy(host).to(self._device, non_blocking=True)
        input_ids, positions, cells, packed = moved.split_with_sizes(self._sizes)
        slots = self._table.index_select(0, cells).long()
        return input_ids, positions, slots, packed.view(torch.int32)[:num]
