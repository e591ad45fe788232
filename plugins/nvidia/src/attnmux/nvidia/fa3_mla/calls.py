"""What the library is told at every call of one latent layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from attnmux.core.context import BackendContext
from attnmux.core.errors import AttnmuxError
from attnmux.core.layer import LayerSpec
from attnmux.nvidia.fa3.kernels import Kernels
from attnmux.nvidia.fa3.schedules import Kind
from attnmux.nvidia.latent import RANK, ROPE, check_latent, check_plain, latent_pages
from attnmux.nvidia.page_tables import KeyGroup, Keys
from attnmux.nvidia.pools import check_sixteen_bits


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Cache:
    """A layer's buffer as the kernels take it: the rotary keys are K, the latents V."""

    k_cache: torch.Tensor
    """[pages, page, 1, 64], every row 576 values behind the one before."""
    v_cache: torch.Tensor
    """[pages, page, 1, 512], likewise."""

    @classmethod
    def of(cls, layer: LayerSpec, context: BackendContext, page_size: int) -> Cache:
        rows = latent_pages(layer, context, page_size)
        return cls(k_cache=rows[..., RANK:], v_cache=rows[..., :RANK])


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LayerCall:
    """A layer's arguments that no step changes."""

    layer: LayerSpec
    arguments: dict[str, Any]
    """By the library's names, of a causal call."""
    group: KeyGroup | None
    """None for a layer whose latents come with the call alone."""
    pages: Cache | None = None
    slots: Cache | None = None
    """The same memory in pages of one: a draft's own keys are named by slots."""
    kind: Kind | None = None

    @classmethod
    def of(cls, layer: LayerSpec, context: BackendContext, *, num_splits: int) -> LayerCall:
        """Raises InvalidInput for a layer that is not a plain latent one, with 512 + 64 dims, and
        for latents of another dtype than Q's.

        num_splits: as `fa3.calls.splits` gives it.
        """
        check_latent(layer)
        check_plain(layer)
        pool = context.token_to_kv_pool
        arguments: dict[str, Any] = {
            "softmax_scale": layer.scaling,
            "causal": True,
            "window_size": (-1, -1),
            "attention_chunk": 0,
            "softcap": 0.0,
            "num_splits": num_splits,
        }
        if layer.layer_id not in pool.layer_ids:
            return cls(layer=layer, arguments=arguments, group=None)
        check_sixteen_bits(context)
        group = KeyGroup.of(layer, context)
        return cls(
            layer=layer,
            arguments=arguments,
            group=group,
            pages=Cache.of(layer, context, pool.page_size),
            slots=Cache.of(layer, context, 1),
            kind=Kind.of(layer, group, arguments, headdim=ROPE, qkv_dtype=pool.dtype),
        )

    def over(
        self,
        kernels: Kernels,
        cache: Cache,
        keys: Keys,
        q: torch.Tensor,
        q_rope: torch.Tensor,
        **arguments: Any,  # noqa: ANN401  # the library's
    ) -> Any:  # noqa: ANN401  # with LSE a tuple
        """The library's answer over cached keys, for queries that lie as it takes them.

        arguments: those of this call, and what it has otherwise than `self.arguments`.
        """
        return kernels.flash_attn_with_kvcache(
            q_rope,
            cache.k_cache,
            cache.v_cache,
            qv=q,
            cache_seqlens=keys.lens,
            page_table=keys.page_table,
            **{**self.arguments, **arguments},
        )

    def stored(self) -> tuple[KeyGroup, Cache, Cache]:
        """Group, pages and slots. Raises AttnmuxError for a layer that the pool does not store."""
        if self.group is None or self.pages is None or self.slots is None:
            raise AttnmuxError(
                f"layer {self.layer.layer_id} is not in the KV pool: call it with its own k and "
                "k_rope and save_kv_cache=False"
            )
        return self.group, self.pages, self.slots
