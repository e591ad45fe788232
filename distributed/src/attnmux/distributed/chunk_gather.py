"""Rows of every rank's chunks on their way to all ranks."""

from __future__ import annotations

from itertools import accumulate, pairwise

import torch

from attnmux.distributed.ranks import Pending, RankGroup
from attnmux.distributed.zigzag import ZigzagStep


class ChunkGather:
    """The rows of a step's tokens, chunk by chunk as in `ZigzagStep.order`.

    Chunks travel from the rank that has them to all others in rounds, in the order of the sequence,
    since a chunk is needed by later ones alone. All rounds start at once and run one after another
    while the caller does other work.
    """

    def __init__(
        self,
        group: RankGroup,
        step: ZigzagStep,
        own: torch.Tensor,
        rows: torch.Tensor,
        *,
        chunks_at_once: int,
    ) -> None:
        """own: [T of this rank, width], rows of its tokens in their order. rows: [T, width], memory
        for all. chunks_at_once: chunks of a round.

        Raises RankFailed as a collective does.
        """
        self._rows = rows
        self._chunks_at_once = chunks_at_once
        ends = [0, *accumulate(map(sum, step.chunk_lens))]
        chunks = [rows[start:end] for start, end in pairwise(ends)]
        first, second = step.own_chunks
        middle = len(chunks[first])
        chunks[first].copy_(own[:middle])
        chunks[second].copy_(own[middle:])
        # As bytes, since NCCL does not know all integers of torch
        moves = [(chunk.view(torch.uint8), step.owner(n)) for n, chunk in enumerate(chunks)]
        self._rounds: list[Pending] = []
        for start in range(0, len(moves), chunks_at_once):
            some = [each for each in moves[start : start + chunks_at_once] if len(each[0])]
            values, owners = [chunk for chunk, _ in some], [owner for _, owner in some]
            self._rounds.append(group.start_broadcasts(values, owners))
        self._waited = 0

    def wait(self, chunks: int | None = None) -> torch.Tensor:
        """[T, width], of which the first `chunks` have arrived; None: all of them.

        Raises RankFailed where they do not arrive.
        """
        last = None if chunks is None else -(-chunks // self._chunks_at_once)
        for pending in self._rounds[self._waited : last]:
            self._waited += 1
            pending.wait()
        return self._rows
