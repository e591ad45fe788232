"""From recorded layers to the request that a backend is chosen for."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attnmux.core.choosing.ask.request import Request
from attnmux.core.dtypes import dtype_name
from attnmux.core.errors import InvalidInput
from attnmux.core.layer import LayerSpec
from attnmux.transformers.pools import alike


def request_of(layers: Sequence[LayerSpec], dtype: torch.dtype) -> Request:
    """What the layers need, every value with the origin "model".

    Where windows or chunks differ between layers, the largest is asked for.
    Raises InvalidInput where heads or dims differ: one KV pool holds all layers.
    """
    first = alike(layers, "tp_q_head_num")
    windows = [layer.sliding_window_size for layer in layers if layer.sliding_window_size >= 0]
    given: dict[str, object] = {
        "kind": first.kind,
        "num_q_heads": first.tp_q_head_num,
        "num_kv_heads": first.tp_k_head_num,
        "head_dim": first.qk_head_dim,
        "v_head_dim": None if first.v_head_dim == first.qk_head_dim else first.v_head_dim,
        "dtype": dtype_name(dtype),
        "sliding_window": max(windows, default=None),
        "attention_chunk": max(layer.attention_chunk_size for layer in layers) or None,
        "logit_cap": max(layer.logit_cap for layer in layers) or None,
        "sinks": any(layer.sinks is not None for layer in layers),
        "cross_attention": any(layer.is_cross_attention for layer in layers),
    }
    return Request().replace(origin="model", **given)


def latent_request(expanded: Request, layers: Sequence[LayerSpec]) -> Request:
    """What `absorbed_layers` need, with the expanded heads of `request_of` as MLA states them."""
    first = alike(layers)
    return expanded.replace(
        origin="model",
        kind="mla",
        num_kv_heads=1,
        v_head_dim=expanded.v_head_dim or expanded.head_dim,
        kv_lora_rank=first.v_head_dim,
        qk_rope_head_dim=first.qk_rope_head_dim,
    )


def check_against_config(recorded: Request, config: Request, *, max_context_len: int) -> None:
    """Refuse a model that does not do what its config.json says.

    recorded: from `request_of`. config: from `Request.from_model`; a latent model is recorded
    expanded and compared as such. A feature that config.json does not mention is no contradiction
    (what runs is what was recorded), nor is a window or chunk that the context never fills.
    Raises InvalidInput naming the field.
    """
    stated = config.expanded() if config.latent else config
    for name in ("num_q_heads", "num_kv_heads", "head_dim"):
        _compare(name, getattr(recorded, name), getattr(stated, name))
    _compare(
        "v_head_dim",
        recorded.v_head_dim or recorded.head_dim,
        stated.v_head_dim or stated.head_dim,
    )
    for name in ("sliding_window", "attention_chunk", "logit_cap", "sinks"):
        reach = getattr(stated, name) if name in ("sliding_window", "attention_chunk") else None
        if getattr(stated, name) and (reach is None or reach < max_context_len):
            _compare(name, getattr(recorded, name), getattr(stated, name))


def _compare(name: str, recorded: object, stated: object) -> None:
    if recorded != stated:
        raise InvalidInput(
            name, came=f"{recorded!r} when the model runs", expected=f"{stated!r}, by config.json"
        )
