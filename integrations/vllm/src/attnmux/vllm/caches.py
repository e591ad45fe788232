"""vLLM's KV caches as a pool."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from attnmux.core import KVPool, LayerSpec, Request, foreign_pool, torch_dtype
from attnmux.vllm.asking import kv_dtype
from attnmux.vllm.layers import is_latent, slots_of


def rehearsal_caches(
    layers: Mapping[str, Any],
    specs: Mapping[str, LayerSpec],
    page_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, torch.Tensor]:
    """One cache of two pages for all layers, as vLLM binds its own."""
    layer, spec = next(zip(layers.values(), specs.values(), strict=True))
    stored = torch_dtype(kv_dtype(layer.kv_cache_dtype, Request.canonical_dtype(dtype)))
    values = spec.qk_head_dim + (0 if is_latent(layer) else spec.v_head_dim)
    shape = 2, page_size, spec.tp_k_head_num, values
    cache = torch.zeros(shape, dtype=stored, device=device)
    return dict.fromkeys(layers, cache.squeeze(2) if is_latent(layer) else cache.transpose(1, 2))


def pool_of(
    layers: Mapping[str, Any],
    specs: Mapping[str, LayerSpec],
    caches: Mapping[str, torch.Tensor],
    page_size: int,
) -> KVPool:
    """The caches of the layers, in vLLM's shapes: nothing is copied."""
    first = next(iter(specs.values()))
    if first.kind == "mla":
        rows = {
            specs[name].layer_id: slots_of(caches[name].unsqueeze(2), layer)
            for name, layer in layers.items()
        }
        return foreign_pool(rows, page_size=page_size, kv_lora_rank=first.v_head_dim)
    buffers = {}
    for name, layer in layers.items():
        # [blocks, Hkv, block, D + Dv]: K and V of a slot lie side by side
        slots = slots_of(caches[name].transpose(1, 2), layer)
        buffers[specs[name].layer_id] = (
            slots[..., : first.qk_head_dim],
            slots[..., first.qk_head_dim :],
        )
    return foreign_pool(buffers, page_size=page_size)
