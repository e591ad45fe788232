"""What the library is told at every call of one layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch

from attnmux.core.context import BackendContext
from attnmux.core.errors import AttnmuxError, InvalidInput
from attnmux.core.kv.quantise import quantise
from attnmux.core.layer import LayerSpec
from attnmux.nvidia.fa3.kernels import Kernels
from attnmux.nvidia.fa3.schedules import Kind
from attnmux.nvidia.page_tables import KeyGroup, Keys
from attnmux.nvidia.pools import FP8, check_own_or_fp8
from attnmux.nvidia.rows import aligned

MOST_SPLITS = 256
MOST_SINKS = 64
"""The kernels copy every head's sink into an array of that many, and look at no bound."""


def splits(context: BackendContext, options: Mapping[str, object]) -> int:
    """The library's `num_splits`: parts of a request's keys, 0 for its own choice.

    It chooses by shapes alone, so that a captured choice holds; but they count the requests, so
    that results which must not depend on the batch are of keys in one part.
    Raises InvalidInput for more parts than the library makes.
    """
    num_splits = cast("int", options.get("num_splits", 0))
    if not 0 <= num_splits <= MOST_SPLITS:
        raise InvalidInput("num_splits", came=num_splits, expected=f"0 to {MOST_SPLITS}")
    return 1 if context.request.deterministic else num_splits


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Quantised:
    """A layer whose K and V are 8-bit floats: the kernels want Q to be so too."""

    k_descale: torch.Tensor
    """[1, Hkv] float32: what K in the pool is multiplied by."""
    v_descale: torch.Tensor

    def queries(self, q: torch.Tensor) -> torch.Tensor:
        """Q as the kernel reads it, unscaled: beyond 448 it saturates."""
        return quantise(q, FP8, None)

    def writes(self, out: torch.Tensor) -> bool:
        """Whether the kernel can write to `out`: it gives bfloat16 whatever Q was."""
        return out.dtype == torch.bfloat16

    def descales(self, batch_size: int) -> dict[str, torch.Tensor]:
        return {
            "k_descale": self.k_descale.expand(batch_size, -1),
            "v_descale": self.v_descale.expand(batch_size, -1),
        }


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Cache:
    """A layer's buffers as the kernels take them."""

    k_cache: torch.Tensor
    """[pages, page, Hkv, D], the pool's memory."""
    v_cache: torch.Tensor

    @classmethod
    def of(cls, layer: LayerSpec, context: BackendContext, page_size: int) -> Cache:
        k_cache, v_cache = (
            buffer.view(-1, page_size, *buffer.shape[1:])
            for buffer in context.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        )
        return cls(k_cache=k_cache, v_cache=v_cache)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LayerCall:
    """A layer's arguments that no step changes."""

    layer: LayerSpec
    group: KeyGroup | None
    """None for a layer whose K and V come with the call alone."""
    arguments: dict[str, Any]
    """By the library's names."""
    pages: Cache | None = None
    slots: Cache | None = None
    """The same memory in pages of one: a draft's own keys are named by slots."""
    quantised: Quantised | None = None
    kind: Kind | None = None

    @classmethod
    def of(cls, layer: LayerSpec, context: BackendContext, *, num_splits: int) -> LayerCall:
        """Raises InvalidInput for a latent layer, for one of more heads with sinks than the kernels
        have room for, and for a KV dtype that is neither Q's nor e4m3.

        num_splits: as `splits` gives it.
        """
        if layer.kind != "mha":
            raise InvalidInput(
                f"layer {layer.layer_id}", came=layer.kind, expected="mha: K and V with heads"
            )
        if layer.sinks is not None and layer.tp_q_head_num > MOST_SINKS:
            raise InvalidInput(
                f"layer {layer.layer_id}",
                came=f"sinks of {layer.tp_q_head_num} heads",
                expected=f"{MOST_SINKS} at most",
            )
        window, causal = layer.sliding_window_size, layer.is_causal and not layer.is_cross_attention
        arguments: dict[str, Any] = {
            "softmax_scale": layer.scaling,
            "causal": causal,
            "window_size": (window, 0) if window >= 0 and causal else (-1, -1),
            "attention_chunk": 0 if layer.is_cross_attention else layer.attention_chunk_size,
            "softcap": layer.logit_cap,
            "num_splits": num_splits,
            # The library reads no other dtype.
            "sinks": None if layer.sinks is None else layer.sinks.to(torch.bfloat16),
        }
        pool = context.token_to_kv_pool
        is_encoders = not layer.is_causal and not layer.is_cross_attention
        if is_encoders or layer.layer_id not in pool.layer_ids:
            return cls(layer=layer, group=None, arguments=arguments)
        check_own_or_fp8(context)
        group = KeyGroup.of(layer, context)
        return cls(
            layer=layer,
            group=group,
            arguments=arguments,
            pages=Cache.of(layer, context, group.page_size),
            slots=Cache.of(layer, context, 1),
            quantised=_quantised(layer, context) if pool.dtype == FP8 else None,
            kind=Kind.of(layer, group, arguments, headdim=layer.qk_head_dim, qkv_dtype=pool.dtype),
        )

    @property
    def serves_trees(self) -> bool:
        """Whether a draft tree's mask is all that hides keys, and its parts can be merged."""
        layer = self.layer
        hides = layer.sliding_window_size >= 0 or layer.attention_chunk_size > 0
        return not hides and layer.sinks is None and not layer.is_cross_attention

    def stores_as_given(
        self, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None
    ) -> bool:
        """Whether the pool holds of a step's new tokens what the layer's call brings, in the dtype
        of Q."""
        if k is None or v is None or self.layer.is_cross_attention:
            return False
        return self.quantised is None and k.dtype == v.dtype == q.dtype

    def queries(self, q: torch.Tensor) -> torch.Tensor:
        """Q [T, Hq, D] as the kernels read and load it."""
        return aligned(q if self.quantised is None else self.quantised.queries(q))

    def writes(self, out: torch.Tensor) -> bool:
        """Whether the kernels' output has the dtype of `out`."""
        return self.quantised is None or self.quantised.writes(out)

    def over(
        self,
        kernels: Kernels,
        cache: Cache,
        keys: Keys,
        q: torch.Tensor,
        **arguments: Any,  # noqa: ANN401  # the library's
    ) -> Any:  # noqa: ANN401  # with LSE a tuple
        """The library's answer over cached keys, for queries that lie as it takes them.

        arguments: those of this call, and what it has otherwise than `self.arguments`.
        """
        if self.quantised is not None:
            arguments.update(self.quantised.descales(len(keys.lens)))
        return kernels.flash_attn_with_kvcache(
            q,
            cache.k_cache,
            cache.v_cache,
            cache_seqlens=keys.lens,
            page_table=keys.page_table,
            **{**self.arguments, **arguments},
        )

    def stored(self) -> tuple[KeyGroup, Cache, Cache]:
        """Group, pages and slots. Raises AttnmuxError for a layer that the pool does not store."""
        if self.group is None or self.pages is None or self.slots is None:
            raise AttnmuxError(
                f"layer {self.layer.layer_id} is not in the KV pool: call it with its own k and v "
                "and save_kv_cache=False"
            )
        return self.group, self.pages, self.slots


def _quantised(layer: LayerSpec, context: BackendContext) -> Quantised:
    k_scale, v_scale = context.token_to_kv_pool.read_scales(layer.k_scale, layer.v_scale)
    shape = (1, layer.tp_k_head_num)
    return Quantised(
        k_descale=torch.full(shape, k_scale, dtype=torch.float32, device=context.device),
        v_descale=torch.full(shape, v_scale, dtype=torch.float32, device=context.device),
    )
