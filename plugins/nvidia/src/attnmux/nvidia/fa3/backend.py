"""FlashAttention 3 on Hopper, for K and V with heads.

If no request has a prefix, it reads K and V of the call: they are contiguous, which the kernels
load faster than pages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from attnmux.core import InvalidInput
from attnmux.core.plugin import KernelLibrary, Rows, rehearse
from attnmux.nvidia.fa3.base import FA3Base
from attnmux.nvidia.fa3.layers import KV, FA3Cache, FA3Layer
from attnmux.nvidia.fa3.providers import PROVIDERS
from attnmux.nvidia.fa3.steps import FA3Step
from attnmux.nvidia.kernel_rows import FP8, check_own_or_fp8

if TYPE_CHECKING:
    from attnmux.core import AttentionCall, LayerSpec

ADDRESS = "nvidia/fa3"
MOST_SINKS = 64
"""The kernels copy the sink of each head to an array of this length, without a check."""


class FA3Backend(FA3Base):
    """MHA and GQA."""

    def prepare_layer(self, layer: LayerSpec) -> FA3Layer:
        """Raises InvalidInput for MLA, for sinks of too many heads, and for a KV dtype that is
        neither Q's nor e4m3; BackendFailed for a feature that the build lacks."""
        _check_layer(layer)
        self.kernels.check_features(layer, ADDRESS)
        window, causal = layer.sliding_window_size, layer.is_causal and not layer.is_cross_attention
        arguments: dict[str, Any] = {
            "softmax_scale": layer.scaling,
            "causal": causal,
            "window_size": (window, 0) if window >= 0 and causal else (-1, -1),
            "attention_chunk": 0 if layer.is_cross_attention else layer.attention_chunk_size,
            "softcap": layer.logit_cap,
            "num_splits": self._num_splits,
            # The library reads no other dtype.
            "sinks": layer.sinks_in(torch.bfloat16),
        }
        pool = self.context.token_to_kv_pool
        is_encoders = not layer.is_causal and not layer.is_cross_attention
        if is_encoders or layer.layer_id not in pool.layer_ids:
            return FA3Layer(layer=layer, arguments=arguments, cache=None)
        check_own_or_fp8(self.context)
        headdim = layer.qk_head_dim
        return FA3Layer(
            layer=layer,
            arguments=arguments,
            cache=FA3Cache.of(
                layer, self.context, self.context.kv_pages, arguments, headdim=headdim
            ),
            descales=self._descales(layer) if pool.dtype == FP8 else None,
        )

    def queries(self, call: AttentionCall) -> tuple[torch.Tensor, None]:
        return Rows.aligned(call.q), None

    def own_keys(self, call: AttentionCall, layer: FA3Layer, step: FA3Step) -> KV | None:
        """Also K and V that go to the pool, if they are all keys of the step, stored unchanged."""
        k, v = call.k, call.v
        if k is None or v is None:
            return None
        stored_as_given = (
            step.tables.has_all_keys
            and layer.descales is None
            and not call.layer.is_cross_attention
            and k.dtype == v.dtype == call.q.dtype
        )
        return (k, v) if stored_as_given or not call.save_kv_cache else None

    def _descales(self, layer: LayerSpec) -> KV:
        context, shape = self.context, (1, layer.tp_k_head_num)
        k_scale, v_scale = context.token_to_kv_pool.read_scales(layer.k_scale, layer.v_scale)
        return (
            torch.full(shape, k_scale, dtype=torch.float32, device=context.device),
            torch.full(shape, v_scale, dtype=torch.float32, device=context.device),
        )


def _check_layer(layer: LayerSpec) -> None:
    if layer.kind != "mha":
        raise InvalidInput(
            f"layer {layer.layer_id}", got=layer.kind, expected="mha: K and V with heads"
        )
    if layer.sinks is not None and layer.tp_q_head_num > MOST_SINKS:
        raise InvalidInput(
            f"layer {layer.layer_id}",
            got=f"sinks of {layer.tp_q_head_num} heads",
            expected=f"at most {MOST_SINKS}",
        )


make = KernelLibrary(address=ADDRESS, backend=FA3Backend, providers=PROVIDERS, trial=rehearse)
