"""Reading and writing single rows of a KV buffer, in the dtype that it stores."""

from __future__ import annotations

import torch

from attnmux.core.kv.pool import word_dtype


def gather_rows(buffer: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """The rows of a K or V buffer [slots, H, D] at `slots` [n] int64, in the buffer's dtype."""
    # torch does not gather 8-bit floats on every device
    raw = buffer.view(torch.uint8) if buffer.itemsize == 1 else buffer
    return raw[slots].view(buffer.dtype)


def scatter_rows(buffer: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """Write rows [n, H, D] of the buffer's dtype to its `slots` [n] int64.

    The values of a head are contiguous; tokens and heads may be any distance apart. Does not
    synchronise.
    """
    places = [rows.shape[-1]]
    for each in (rows, buffer):
        places += [int(each.storage_offset()), *each.stride()[:2]]
    word = word_dtype(*(place * buffer.itemsize for place in places))
    buffer.view(word).index_copy_(0, slots, rows.view(word))
