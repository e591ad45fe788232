"""What the library is told at every call of one layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from attnmux.core.context import BackendContext
from attnmux.core.errors import AttnmuxError, InvalidInput
from attnmux.core.layer import LayerSpec
from attnmux.nvidia.latent import RANK, check_latent, check_plain, latent_pages
from attnmux.nvidia.page_tables import KeyGroup
from attnmux.nvidia.pools import check_sixteen_bits

REGULAR = 16
"""What dims are multiples of where the library has no need to look for their end."""

TILE = 128
"""Rows of a tile of the kernel over latents, which heads are packed into."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Cache:
    """A layer's keys in the pool, as the library takes them."""

    group: KeyGroup
    k: torch.Tensor
    """[pages, page, Hkv, D], the pool's memory; of a latent row the rotary part,
    [pages, page, 1, 64]."""
    v: torch.Tensor
    """[pages, page, Hkv, Dv]; of a latent row the latent, [pages, page, 1, 512]."""

    @classmethod
    def of(cls, layer: LayerSpec, context: BackendContext) -> Cache:
        """Raises InvalidInput for a pool of another dtype than Q's."""
        pool = context.token_to_kv_pool
        check_sixteen_bits(context)
        group = KeyGroup.of(layer, context)
        if layer.kind == "mla":
            rows = latent_pages(layer, context, group.page_size)
            return cls(group=group, k=rows[..., RANK:], v=rows[..., :RANK])
        k, v = (
            buffer.view(-1, group.page_size, *buffer.shape[1:])
            for buffer in pool.get_kv_buffer(layer.layer_id)
        )
        return cls(group=group, k=k, v=v)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LayerCall:
    """A layer's arguments that no step changes."""

    layer: LayerSpec
    arguments: dict[str, Any]
    """By the library's names."""
    cache: Cache | None
    """None for a layer whose K and V come with the call alone."""

    @classmethod
    def of(cls, layer: LayerSpec, context: BackendContext) -> LayerCall:
        """Raises InvalidInput for a layer that sees other keys than all before a token, for a
        latent of other dims than 512 + 64, and for a pool of another dtype than Q's."""
        _check_visible_keys(layer)
        arguments: dict[str, Any] = {
            "softmax_scale": layer.scaling,
            "causal": True,
            "softcap": layer.logit_cap,
            # The library reads no other dtype.
            "learnable_sink": None if layer.sinks is None else layer.sinks.to(torch.bfloat16),
            # In one part a request's bits depend on nothing else in its batch.
            "num_splits": 1,
        }
        if layer.qk_head_dim % REGULAR or layer.v_head_dim % REGULAR:
            # Unpacked heads are loaded by TMA; packed ones that do not fill a tile do not compile.
            arguments["pack_gqa"] = False
        if layer.kind == "mla":
            check_latent(layer)
            check_plain(layer)
            heads = layer.tp_q_head_num
            if TILE % heads and heads % TILE:
                arguments["pack_gqa"] = False  # It is by default, and tiles of it must be whole.
        stored = layer.layer_id in context.token_to_kv_pool.layer_ids
        cache = Cache.of(layer, context) if stored else None
        return cls(layer=layer, arguments=arguments, cache=cache)

    def required_cache(self) -> Cache:
        """Raises AttnmuxError for a layer that the pool does not store."""
        if self.cache is None:
            raise AttnmuxError(
                f"layer {self.layer.layer_id} is not in the KV pool: call it with its own k and v "
                "and save_kv_cache=False"
            )
        return self.cache


def _check_visible_keys(layer: LayerSpec) -> None:
    unserved = {
        "is_causal=False": not layer.is_causal,
        "is_cross_attention": layer.is_cross_attention,
        "sliding_window_size": layer.sliding_window_size >= 0,
        "attention_chunk_size": layer.attention_chunk_size > 0,
    }
    came = [name for name, is_set in unserved.items() if is_set]
    if came:
        raise InvalidInput(
            f"layer {layer.layer_id}",
            came=" and ".join(came),
            expected="causal attention to all keys before a token",
        )
