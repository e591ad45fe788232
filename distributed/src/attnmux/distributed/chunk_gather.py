"""Rows of every rank's chunks on their way to all ranks."""

from __future__ import annotations

from itertools import accumulate, pairwise

import torch

from attnmux.core import Pending, RankGroup
from attnmux.distributed.zigzag import ZigzagStep


class ChunkGather:
    """The rows of a step's tokens, chunk by chunk as in `ZigzagStep.order`.

    Each chunk is broadcast by the rank that has it, in the order of the sequence: a chunk is needed
    by later ones alone. All broadcasts start at once and run while the caller does other work.
    """

    def __init__(
        self, group: RankGroup, step: ZigzagStep, own: torch.Tensor, rows: torch.Tensor
    ) -> None:
        """own: [T of this rank, width], rows of its tokens in their order. rows: [T, width], memory
        for all.

        Raises RankFailed as a collective does.
        """
        self.rows = rows
        """What has arrived, see `wait`."""
        ends = [0, *accumulate(map(sum, step.chunk_lens))]
        chunks = [rows[start:end] for start, end in pairwise(ends)]
        first, second = step.own_chunks
        middle = len(chunks[first])
        chunks[first].copy_(own[:middle])
        chunks[second].copy_(own[middle:])
        self._pending: list[Pending | None] = [
            # As bytes, since NCCL does not know all integers of torch
            group.start_broadcast(chunk.view(torch.uint8), root=step.owner(number))
            if len(chunk) and step.size > 1
            else None
            for number, chunk in enumerate(chunks)
        ]
        self._waited = 0

    def wait(self, chunks: int | None = None) -> torch.Tensor:
        """`rows`, of which the first `chunks` have arrived; None: all of them.

        Raises RankFailed where they do not arrive.
        """
        wanted = self._pending[self._waited : chunks]
        for pending in wanted:
            self._waited += 1
            if pending is not None:
                pending.wait()
        return self.rows
