"""The KV pool that a model's layers need, and what a token takes in it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attnmux.core.choosing.tell.decision import Decision
from attnmux.core.dtypes import torch_dtype
from attnmux.core.errors import InvalidInput
from attnmux.core.kv import KVPool, MHATokenToKVPool, MLATokenToKVPool
from attnmux.core.layer import LayerSpec

STORED = ("kind", "tp_k_head_num", "qk_head_dim", "v_head_dim")


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
    first = alike(layers)
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
    first = alike(layers)
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


def alike(layers: Sequence[LayerSpec], *also: str) -> LayerSpec:
    """A layer whose kind, KV heads and dims, and the fields in `also`, all of them have.

    Raises InvalidInput naming the first that differs.
    """
    if not layers:
        raise InvalidInput("layers", came="none", expected="at least one layer")
    first = layers[0]
    for layer in layers[1:]:
        for name in (*STORED, *also):
            if getattr(layer, name) != getattr(first, name):
                raise InvalidInput(
                    f"layer {layer.layer_id}",
                    came=f"{name} {getattr(layer, name)}",
                    expected=f"{getattr(first, name)}, as in layer {first.layer_id}: one KV pool "
                    "holds all layers",
                )
    return first
