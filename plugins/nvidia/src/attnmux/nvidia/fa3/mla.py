"""FlashAttention 3 on Hopper, over MLA's latent cache.

A logit is q · k + qv · v, the absorbed one: `q` is the rotary part of the queries and K that of the
cache; `qv` is the rest of the queries and V the latent.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from attnmux.core.plugin import KernelLibrary, LatentRows, Rows, rehearse
from attnmux.nvidia.fa3.base import FA3Base
from attnmux.nvidia.fa3.layers import KV, FA3Cache, FA3Layer, rotary_and_latent
from attnmux.nvidia.fa3.providers import PROVIDERS
from attnmux.nvidia.fa3.steps import FA3Step

if TYPE_CHECKING:
    import torch

    from attnmux.core import AttentionCall, LayerSpec


class FA3MLABackend(FA3Base):
    """MLA, absorbed."""

    def prepare_layer(self, layer: LayerSpec) -> FA3Layer:
        """Raises InvalidInput for a layer that is not plain MLA with 512 + 64 dims, and for latents
        of another dtype than Q's."""
        LatentRows.check(layer)
        arguments: dict[str, Any] = {
            "softmax_scale": layer.scaling,
            "causal": True,
            "window_size": (-1, -1),
            "attention_chunk": 0,
            "softcap": 0.0,
            "num_splits": self._num_splits,
        }
        if layer.layer_id not in self.context.token_to_kv_pool.layer_ids:
            return FA3Layer(layer=layer, arguments=arguments, cache=None)
        self.context.check_sixteen_bits()
        cache = FA3Cache.of(
            layer,
            self.context,
            partial(rotary_and_latent, self.context),
            arguments,
            headdim=LatentRows.ROPE_DIM,
        )
        return FA3Layer(layer=layer, arguments=arguments, cache=cache)

    def queries(self, call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
        return Rows.aligned(call.rotary_queries()), Rows.aligned(call.q)

    def own_keys(self, call: AttentionCall, layer: FA3Layer, step: FA3Step) -> KV | None:
        if call.save_kv_cache or call.k is None or call.k_rope is None:
            return None
        return call.k_rope, call.k


make = KernelLibrary(
    address="nvidia/fa3_mla", backend=FA3MLABackend, providers=PROVIDERS, trial=rehearse
)
