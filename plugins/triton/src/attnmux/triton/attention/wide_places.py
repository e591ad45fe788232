"""Where a step's keys of 8 bits are written as 16 bits."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attnmux.core import ForwardBatch
from attnmux.triton.kernels.widen import PIECE
from attnmux.triton.launches.operands import Slots

KEYS: int = 2 * PIECE.value
"""Requests have whole blocks of as many keys if values are turned: the most of a kernel's block."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class WidePlaces:
    """Where the 16-bit keys of a step are, and how many there are."""

    starts: torch.Tensor
    """[B] int32: each request's first row."""
    slots: Slots | None
    """None if rows are pieces."""
    longest: int
    total: int

    @classmethod
    def of(cls, batch: ForwardBatch, lens: torch.Tensor, *, in_pieces: bool) -> WidePlaces:
        """lens: [B] int32 on the host. in_pieces: see `turn_values`."""
        sizes = batch.seq_lens
        if in_pieces:
            sizes, lens = pieces_of(sizes), pieces_of(lens)
        longest, total = int(lens.max()), int(lens.sum())
        starts = sizes.cumsum(0, dtype=torch.int32) - sizes
        if in_pieces:
            return cls(starts=starts, slots=None, longest=longest, total=total)
        # Kernels are compiled for strides that are multiples of 16, and for others
        width = -(-longest // 16) * 16
        table = starts[:, None] + torch.arange(width, dtype=torch.int32, device=starts.device)
        slots = Slots(table=table, rows=None, page_size=1, begins_with_encoder=False)
        return cls(starts=starts, slots=slots, longest=longest, total=total)

    @property
    def table(self) -> Slots:
        """`slots` of rows that are keys."""
        assert self.slots is not None
        return self.slots


def pieces_of(lens: torch.Tensor) -> torch.Tensor:
    """Pieces of `turn_values` that requests of these lengths have."""
    return (lens + KEYS - 1) // KEYS * 2
