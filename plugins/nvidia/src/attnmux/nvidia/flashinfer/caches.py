"""The pool's memory as the kernels want it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attnmux.core.kv import KVPool
from attnmux.core.layer import LayerSpec


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Cache:
    """A layer's part of the pool."""

    kv: tuple[torch.Tensor, torch.Tensor]
    """K and V, [pages, page_size, Hkv, D]."""
    k_scale: float | None
    v_scale: float | None
    """None for 1: the library then leaves out a product."""


def layer_cache(layer: LayerSpec, pool: KVPool, page_size: int) -> Cache:
    """The layer's buffers in pages of the kernels' size.

    Scales are numbers: the library would read a tensor on the host.
    """
    keys, values = (
        buffer.view(-1, page_size, *buffer.shape[1:])
        for buffer in pool.get_kv_buffer(layer.layer_id)
    )
    k_scale, v_scale = pool.read_scales(layer.k_scale, layer.v_scale)
    return Cache(
        kv=(keys, values),
        k_scale=None if k_scale == 1 else k_scale,
        v_scale=None if v_scale == 1 else v_scale,
    )
