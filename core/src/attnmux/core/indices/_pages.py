"""From tokens to pages."""

from __future__ import annotations

import torch


def page_counts(lens: torch.Tensor, page_size: int) -> torch.Tensor:
    """Pages that hold lens tokens: the quotient, rounded up."""
    return lens if page_size == 1 else (lens + (page_size - 1)) // page_size


def page_numbers(slots: torch.Tensor, page_size: int) -> torch.Tensor:
    """The page of each slot, written over slots."""
    if page_size == 1:
        return slots
    if page_size & (page_size - 1) == 0:
        return slots.bitwise_right_shift_(page_size.bit_length() - 1)
    return slots.floor_divide_(page_size)
