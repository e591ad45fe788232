"""Rows [T, H, D] where kernels can load and store them.

Tokens of Q, K and V may be any distance apart; the libraries load 16 bytes at once and check
nothing, and a misaligned address ends the process's use of the device.
"""

from __future__ import annotations

import torch

ALIGNMENT = 16
"""Bytes that the kernels load at once: heads of Q, K, V and output begin at multiples of it."""


def is_aligned(rows: torch.Tensor) -> bool:
    """Whether the kernels can load or store the rows [T, H, D] where they are."""
    strides = rows.stride(0) | rows.stride(1)  # as aligned as the lesser, for a power of 2
    return rows.data_ptr() % ALIGNMENT == 0 and strides * rows.element_size() % ALIGNMENT == 0


def aligned(rows: torch.Tensor) -> torch.Tensor:
    """The rows [T, H, D], or a copy that the kernels can load."""
    return rows if is_aligned(rows) else rows.clone(memory_format=torch.contiguous_format)


def is_writable(out: torch.Tensor) -> bool:
    """Whether kernels that want rows end to end can store them in `out`."""
    return out.is_contiguous() and is_aligned(out)


def by_request(rows: torch.Tensor, each: int) -> torch.Tensor:
    """Rows [T, H, D] of requests that have `each` tokens as [B, each, H, D], a view."""
    return rows.unsqueeze(1) if each == 1 else rows.view(-1, each, *rows.shape[1:])
