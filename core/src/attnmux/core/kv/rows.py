"""Reading and writing single rows of a KV buffer, in the dtype that it stores."""

from __future__ import annotations

import torch

from attnmux.core.kv.four_bits import unpack_rows
from attnmux.core.kv.pool import KVPool, word_dtype


def gather_rows(buffer: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """The rows of a K or V buffer [slots, H, D] at `slots` [n] int64, in the buffer's dtype."""
    # torch does not gather 8-bit floats on every device
    raw = buffer.view(torch.uint8) if buffer.itemsize == 1 else buffer
    return raw[slots].view(buffer.dtype)


def wide_rows(
    pool: KVPool, layer_id: int, slots: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """K [n, Hkv, D] and V [n, Hkv, Dv] at `slots` [n] int64 of the layer's buffers, in the dtype
    that they are stored in; 4-bit floats in float32, exactly. The scales of `read_scales` are still
    to be applied."""
    buffers, scales = pool.get_kv_buffer(layer_id), pool.get_scale_buffers(layer_id)
    k, v = (gather_rows(each, slots) for each in buffers)
    if scales is None:
        return k, v
    k_scales, v_scales = (gather_rows(each, slots) for each in scales)
    return unpack_rows(k, k_scales), unpack_rows(v, v_scales)


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
