"""The smallest step of each phase for backends of linear layers."""

from __future__ import annotations

import torch

from attnmux.core import ForwardBatch, LinearLayerSpec
from attnmux.core.plugin import LinearAttentionBackend, rehearse


def rehearse_linear(backend: LinearAttentionBackend, kind: str) -> None:
    """Run one token in each phase of the request, once for each shape of the kind's layers.

    The states are those of padding's row. Phases that the backend refuses, and those for which the
    pool has no room, are left out. Raises what the library raises.
    """
    layers = {
        (layer.num_k_heads, layer.num_v_heads, layer.conv_size, layer.conv_dims): layer
        for layer in backend.states.layers
        if layer.kind == kind
    }

    def run(backend: LinearAttentionBackend, batch: ForwardBatch) -> None:
        for layer in layers.values():
            _run_linear(backend, layer, batch)

    rehearse(backend, run)


def _run_linear(
    backend: LinearAttentionBackend, layer: LinearLayerSpec, batch: ForwardBatch
) -> None:
    """Call the layer's convolutions and its recurrence."""
    states, num = backend.states, batch.num_tokens

    def zeros(*shape: int, dtype: torch.dtype = states.conv_dtype) -> torch.Tensor:
        return torch.zeros((num, *shape), dtype=dtype, device=states.device)

    for index, channels in enumerate(layer.conv_dims):
        weight = torch.zeros(
            (channels, layer.conv_size), dtype=states.conv_dtype, device=states.device
        )
        backend.convolve(zeros(channels), weight, layer, batch, silu=True, index=index)
    if layer.has_state:
        keys = layer.num_k_heads, layer.head_k_dim
        backend.forward(
            zeros(*keys),
            zeros(*keys),
            zeros(layer.num_v_heads, layer.head_v_dim),
            layer,
            batch,
            g=zeros(*layer.decay_shape, dtype=torch.float32),
            beta=zeros(layer.num_v_heads),
        )
