"""Keys named one by one: a row of slots for each query, as a table of pages of one token."""

from __future__ import annotations

import torch


def listed(slots: torch.Tensor, seen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Move the slots that are seen to the front of their row, in their order, on the device.

    slots: [..., n] int32. seen: [..., n] bool.
    Returns the table [..., n] int32, 0 after the slots of a row, and their number [...] int32. The
    table is part of one of n + 1 columns.
    """
    last = slots.shape[-1]
    # Slots that are not seen go to an extra column, which is then cut off.
    places = seen.cumsum(-1).sub_(1).masked_fill_(~seen, last)
    table = slots.new_zeros((*seen.shape[:-1], last + 1)).scatter_(-1, places, slots)
    return table[..., :last], seen.sum(-1, dtype=torch.int32)
