"""The request that a model's recorded layers make to backends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from attnmux.core import (
    InvalidInput,
    LayerGroup,
    LayerSpec,
    LinearLayerSpec,
    Request,
)
from attnmux.transformers.requests.shapes import SHAPE, STORED, by_shape


def request_of(
    layers: Sequence[LayerSpec], dtype: torch.dtype, linear: Sequence[LinearLayerSpec] = ()
) -> Request:
    """The layers' request, every value with the origin "model".

    If windows or chunks differ between layers of the same heads and dims, the largest counts.
    Layers of other heads or dims than the first, or with a KV dtype of their own, are the request's
    `other_layers`.
    Raises InvalidInput if latent layers or linear layers of a kind differ.
    """
    alike = by_shape(layers, *SHAPE)
    first, *others = sorted(alike, key=lambda group: group[0].kv_dtype is not None)
    fields: dict[str, object] = {
        "kind": first[0].kind,
        **_needs(first),
        "other_layers": [
            LayerGroup(layers=len(each), kv_dtype=each[0].kv_dtype, **_needs(each))
            for each in others
        ],
        "dtype": Request.canonical_dtype(dtype),
        "cross_attention": any(layer.is_cross_attention for layer in layers),
        "alibi": any(layer.alibi_slopes is not None for layer in layers),
        "relative_bias": any(layer.relative_bias is not None for layer in layers),
        **_linear_needs(linear),
    }
    return Request().replace(origin="model", **fields)


def _needs(layers: Sequence[LayerSpec]) -> dict[str, Any]:
    """Fields of the request for layers of one shape."""
    first = layers[0]
    windows = [layer.sliding_window_size for layer in layers if layer.sliding_window_size >= 0]
    return {
        "num_q_heads": first.tp_q_head_num,
        "num_kv_heads": first.tp_k_head_num,
        "head_dim": first.qk_head_dim,
        "v_head_dim": None if first.v_head_dim == first.qk_head_dim else first.v_head_dim,
        "sliding_window": max(windows, default=None),
        "attention_chunk": max(layer.attention_chunk_size for layer in layers) or None,
        "logit_cap": max(layer.logit_cap for layer in layers) or None,
        "sinks": any(layer.sinks is not None for layer in layers),
    }


def _linear_needs(linear: Sequence[LinearLayerSpec]) -> dict[str, object]:
    dims = {(layer.head_k_dim, layer.head_v_dim) for layer in linear if layer.has_state}
    if len(dims) > 1:
        got = f"dims {sorted(dims)} of K and V"
        raise InvalidInput("linear layers", got=got, expected="the same in all of them")
    k_dim, v_dim = next(iter(dims), (None, None))
    return {
        "linear_layers": Counter(layer.kind for layer in linear),
        "linear_head_dim": k_dim,
        "linear_v_head_dim": None if v_dim == k_dim else v_dim,
    }


def latent_request(expanded: Request, layers: Sequence[LayerSpec]) -> Request:
    """The request of `absorbed_layers`, from the expanded heads of `request_of`, in MLA's terms."""
    first = by_shape(layers, *STORED)[0][0]
    return expanded.replace(
        origin="model",
        kind="mla",
        num_kv_heads=1,
        v_head_dim=expanded.v_head_dim or expanded.head_dim,
        kv_lora_rank=first.v_head_dim,
        qk_rope_head_dim=first.qk_rope_head_dim,
    )
