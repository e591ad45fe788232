"""Reading single rows of a pool of any dtype."""

from __future__ import annotations

import torch

from attnmux.core import KVPool


def wide_rows(
    pool: KVPool, layer_id: int, slots: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """K [n, Hkv, D] and V [n, Hkv, Dv] at `slots` [n] int64 of the layer's buffers, in the dtype
    that they are stored in; 4-bit floats in float32, exactly. The scales of `read_scales` are still
    to be applied."""
    buffers, scales = pool.get_kv_buffer(layer_id), pool.get_scale_buffers(layer_id)
    k, v = (KVPool.gather_rows(each, slots) for each in buffers)
    if scales is None:
        return k, v
    k_scales, v_scales = (KVPool.gather_rows(each, slots) for each in scales)
    return KVPool.unpack_rows(k, k_scales), KVPool.unpack_rows(v, v_scales)
