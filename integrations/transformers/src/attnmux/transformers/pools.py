"""The KV pool that a model's layers need, and what a token takes in it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attnmux.core.choosing.decision import Decision
from attnmux.core.dtypes import torch_dtype
from attnmux.core.errors import InvalidInput
from attnmux.core.kv import KVPool, MHATokenToKVPool, MLATokenToKVPool
from attnmux.core.layer import LayerSpec


def make_pool(
    layers: Sequence[LayerSpec], decision: Decision, *, size: int, device: torch.device
) -> KVPool:
    """Room for `size` tokens, whole pages of the decision, in its KV dtype.

    An MLA pool for latent layers, else one of K and V. Every layer has a buffer of `size` tokens,
    so a cross-attention layer's holds room for decoder tokens that it never writes, and a
    self-attention layer's for the encoder's.
    Raises InvalidInput for layers that one pool cannot hold, PoolExhausted when the memory does
    not suffice.
    """
    dtype = torch_dtype(decision.kv_dtype)
    layer_ids = [layer.layer_id for layer in layers]
    first = _shared_shape(layers)
    if first.kind == "mla":
        return MLATokenToKVPool(
            size=size,
            page_size=decision.page_size,
            dtype=dtype,
            layer_ids=layer_ids,
            kv_lora_rank=first.v_head_dim,
            qk_rope_head_dim=first.qk_rope_head_dim,
            device=device,
        )
    return MHATokenToKVPool(
        size=size,
        page_size=decision.page_size,
        dtype=dtype,
        layer_ids=layer_ids,
        num_kv_heads=first.tp_k_head_num,
        head_dim=first.qk_head_dim,
        v_head_dim=first.v_head_dim,
        device=device,
    )


def bytes_per_token(layers: Sequence[LayerSpec], decision: Decision) -> int:
    """Bytes that one token takes in all layers of `make_pool`'s pool.

    Raises InvalidInput for layers that one pool cannot hold.
    """
    dtype = torch_dtype(decision.kv_dtype)
    first = _shared_shape(layers)
    if first.kind == "mla":
        return MLATokenToKVPool.bytes_per_token(
            dtype=dtype,
            num_layers=len(layers),
            kv_lora_rank=first.v_head_dim,
            qk_rope_head_dim=first.qk_rope_head_dim,
        )
    return MHATokenToKVPool.bytes_per_token(
        dtype=dtype,
        num_layers=len(layers),
        num_kv_heads=first.tp_k_head_num,
        head_dim=first.qk_head_dim,
        v_head_dim=first.v_head_dim,
    )


def _shared_shape(layers: Sequence[LayerSpec]) -> LayerSpec:
    """A layer whose kind, KV heads and dims all of them have."""
    if not layers:
        raise InvalidInput("layers", came="none", expected="at least one layer")
    expected = _stored(layers[0])
    for layer in layers:
        if _stored(layer) != expected:
            raise InvalidInput(
                f"layer {layer.layer_id}",
                came=f"(kind, KV heads, head dim, V head dim) = {_stored(layer)}",
                expected=f"{expected}, as in layer {layers[0].layer_id}: one pool holds all layers",
            )
    return layers[0]


def _stored(layer: LayerSpec) -> tuple[str, int, int, int]:
    return layer.kind, layer.tp_k_head_num, layer.qk_head_dim, layer.v_head_dim
