"""Rows [T, H, D] as the kernels load and store them.

Tokens of Q, K and V may be any distance apart. The libraries load 16 bytes at once without a check,
and after a misaligned load the process cannot use the device any more.
"""

from __future__ import annotations

import torch

from attnmux.core.errors import InvalidInput

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


def check_keys_dtype(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Raises InvalidInput for a call's own K and V of another dtype than Q."""
    if k.dtype != q.dtype or v.dtype != q.dtype:
        raise InvalidInput("k", got=f"{k.dtype} and {v.dtype}", expected=f"{q.dtype}, as q is")
