"""What the library is told at every call of one layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from attnmux.core.context import BackendContext
from attnmux.core.errors import InvalidInput
from attnmux.core.kv.quantise import quantise
from attnmux.core.layer import LayerSpec
from attnmux.nvidia.page_tables import KeyGroup
from attnmux.nvidia.pools import FP8


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LayerCall:
    """A layer's arguments that no step changes."""

    layer: LayerSpec
    group: KeyGroup
    kv: tuple[torch.Tensor, torch.Tensor]
    """K and V, [pages, page, Hkv, D], the pool's memory."""
    bmm1_scale: float
    """Of the logits, de-quantisation included."""
    arguments: dict[str, Any]
    """Of the functions that read the pool's pages, by the library's names. A window is the number
    of keys before a token, as ours, in all of them."""

    @classmethod
    def of(cls, layer: LayerSpec, context: BackendContext) -> LayerCall:
        """Raises InvalidInput for a layer that no kernel serves or that the pool does not store."""
        _check(layer, context)
        pool = context.token_to_kv_pool
        k_scale, v_scale = pool.read_scales(layer.k_scale, layer.v_scale)
        k_cache, v_cache = (
            buffer.view(-1, pool.page_size, *buffer.shape[1:])
            for buffer in pool.get_kv_buffer(layer.layer_id)
        )
        bmm1_scale = layer.scaling * k_scale
        return cls(
            layer=layer,
            group=KeyGroup.of(layer, context),
            kv=(k_cache, v_cache),
            bmm1_scale=bmm1_scale,
            arguments={
                "bmm1_scale": bmm1_scale,
                "bmm2_scale": v_scale,
                "window_left": layer.sliding_window_size,
                "sinks": layer.sinks,
                "kv_layout": "NHD",
            },
        )

    @property
    def is_fp8(self) -> bool:
        return self.kv[0].dtype == FP8

    def queries(self, q: torch.Tensor) -> torch.Tensor:
        """Q for kernels that want it in the dtype of K and V, unscaled: beyond 448 it saturates."""
        return quantise(q, FP8, None) if self.is_fp8 else q


def _check(layer: LayerSpec, context: BackendContext) -> None:
    extras = {
        f"kind {layer.kind}": layer.kind != "mha",
        "is_cross_attention": layer.is_cross_attention,
        "is_causal=False": not layer.is_causal,
        "logit_cap": layer.logit_cap > 0,
        "attention_chunk_size": layer.attention_chunk_size > 0,
        f"dims {layer.qk_head_dim} and {layer.v_head_dim}": layer.qk_head_dim != layer.v_head_dim,
        "no place in the KV pool": layer.layer_id not in context.token_to_kv_pool.layer_ids,
    }
    came = [name for name, is_set in extras.items() if is_set]
    if came:
        raise InvalidInput(
            f"layer {layer.layer_id}",
            came=" and ".join(came),
            expected="causal self-attention over the pool, one head dim, without cap and chunks",
        )
