"""What the library is told at every call of one layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attnmux.core.context import BackendContext
from attnmux.core.dtypes import torch_dtype
from attnmux.core.errors import AttnmuxError, InvalidInput
from attnmux.core.layer import LayerSpec
from attnmux.nvidia.dual_chunk.regions import Group

PLAIN = {
    "sliding_window_size": -1,
    "attention_chunk_size": 0,
    "logit_cap": 0.0,
    "sinks": None,
    "is_causal": True,
    "is_cross_attention": False,
}
"""What a layer must have of each feature: chunks are served beside none."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LayerCall:
    """A layer's arguments that no step changes."""

    layer: LayerSpec
    group: Group | None = None
    """None for a layer whose K and V come with the call alone."""
    k_cache: torch.Tensor | None = None
    """[pages, page, Hkv, D], the pool's memory."""
    v_cache: torch.Tensor | None = None

    @classmethod
    def of(cls, layer: LayerSpec, context: BackendContext) -> LayerCall:
        """Raises InvalidInput for a layer of another kind or with a feature beside its chunks, and
        for a pool of another dtype than Q's."""
        name = f"layer {layer.layer_id}"
        if layer.kind != "dual_chunk":
            raise InvalidInput(name, came=layer.kind, expected="dual_chunk: three queries a token")
        for feature, plain in PLAIN.items():
            value = getattr(layer, feature)
            if value is not plain and value != plain:
                came = "a tensor" if isinstance(value, torch.Tensor) else value
                raise InvalidInput(name, came=f"{feature} {came}", expected=str(plain))
        if layer.v_head_dim != layer.qk_head_dim:
            raise InvalidInput(name, came=f"v_head_dim {layer.v_head_dim}", expected="that of K")
        pool, asked = context.token_to_kv_pool, context.request.dtype
        if layer.layer_id not in pool.layer_ids:
            return cls(layer=layer)
        if asked is not None and pool.dtype != torch_dtype(asked):
            raise InvalidInput(
                "token_to_kv_pool", came=pool.dtype, expected=f"{asked}, as the queries are"
            )
        group = Group.of(layer, context)
        k_cache, v_cache = pool.get_kv_buffer(layer.layer_id)
        return cls(
            layer=layer,
            group=group,
            k_cache=k_cache.view(-1, group.keys.page_size, *k_cache.shape[1:]),
            v_cache=v_cache.view(-1, group.keys.page_size, *v_cache.shape[1:]),
        )

    def required(self) -> tuple[Group, torch.Tensor, torch.Tensor]:
        """Where the keys are. Raises AttnmuxError for a layer that the pool does not store."""
        if self.group is None or self.k_cache is None or self.v_cache is None:
            raise AttnmuxError(
                f"layer {self.layer.layer_id} is not in the KV pool: call it with its own k and v "
                "and save_kv_cache=False"
            )
        return self.group, self.k_cache, self.v_cache
