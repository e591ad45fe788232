"""Where a step's keys of 8 bits are written as 16 bits."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attnmux.core import ForwardBatch
from attnmux.triton.launches.operands import Slots


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class WidePlaces:
    """Where the 16-bit keys of a step are, and how many there are."""

    starts: torch.Tensor
    """[B] int32: each request's first row."""
    slots: Slots
    longest: int
    total: int

    @classmethod
    def of(cls, batch: ForwardBatch, lens: torch.Tensor) -> WidePlaces:
        """lens: [B] int32 on the host."""
        longest, total = int(lens.max()), int(lens.sum())
        ends = batch.seq_lens.cumsum(0, dtype=torch.int32)
        starts = ends - batch.seq_lens
        # Kernels are compiled for strides that are multiples of 16, and for others
        width = -(-longest // 16) * 16
        table = starts[:, None] + torch.arange(width, dtype=torch.int32, device=starts.device)
        slots = Slots(table=table, rows=None, page_size=1, begins_with_encoder=False)
        return cls(starts=starts, slots=slots, longest=longest, total=total)
