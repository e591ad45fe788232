"""Pools of one layer, in which K and V of transformers' caches are read."""

from __future__ import annotations

from typing import NamedTuple

import torch

from attnmux.core import Decision, KVPool, LayerSpec, ReqToTokenPool
from attnmux.transformers.model.visible import Lens
from attnmux.transformers.requests.pools import make_pool

LEAST_CONTEXT = 1024
"""Tokens of a sequence for which there is room from the start. More double it."""


class Room(NamedTuple):
    """Sequences, and tokens of the longest."""

    batch_size: int
    context_len: int

    @classmethod
    def for_lens(cls, lens: Lens) -> Room:
        longest = max(LEAST_CONTEXT, *lens.keys)
        return cls(_power_of_2(len(lens.keys)), _power_of_2(longest))

    def holds(self, lens: Lens) -> bool:
        return len(lens.keys) <= self.batch_size and max(lens.keys) <= self.context_len

    def union(self, other: Room) -> Room:
        return Room(
            max(self.batch_size, other.batch_size), max(self.context_len, other.context_len)
        )


def _power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()


class Stage:
    """A pool of one layer. Row i of its request table has slots of its own, one after another."""

    def __init__(
        self, layer: LayerSpec, decision: Decision, room: Room, device: torch.device
    ) -> None:
        self.room = room
        pages = -(-room.context_len // decision.page_size)
        self.row_slots = pages * decision.page_size
        size = room.batch_size * self.row_slots
        self.pool: KVPool = make_pool([layer], decision, size=size, device=device)
        self.table = ReqToTokenPool(room.batch_size, room.context_len, device)
        self.first_slot = decision.page_size
        rows = torch.arange(room.batch_size, device=device).unsqueeze(1) * self.row_slots
        columns = torch.arange(room.context_len, device=device)
        self.table.req_to_token[1:] = rows + columns + self.first_slot

    def slots(self, starts: list[int], lens: tuple[int, ...], device: torch.device) -> torch.Tensor:
        """Slots of each sequence's tokens starts <= place < starts + lens: [sum of lens] int64."""
        rows = torch.arange(len(lens), device=device) * self.row_slots + self.first_slot
        begins = rows + torch.tensor(starts, device=device)
        counts = torch.tensor(lens, device=device)
        total = sum(lens)
        before = counts.cumsum(0) - counts
        shift = (begins - before).repeat_interleave(counts, output_size=total)
        return shift + torch.arange(total, device=device)
