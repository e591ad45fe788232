"""Reading single rows of a KV buffer."""

from __future__ import annotations

import torch


def gather_rows(buffer: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """The rows of a K or V buffer [slots, H, D] at `slots` [n] int64, in the buffer's dtype."""
    # torch does not gather 8-bit floats on every device
    raw = buffer.view(torch.uint8) if buffer.itemsize == 1 else buffer
    return raw[slots].view(buffer.dtype)
