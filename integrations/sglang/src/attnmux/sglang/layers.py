"""SGLang's attention layers in attnmux's words: layer specs and the request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention

from attnmux.core import InvalidInput, LayerSpec, Request, dtype_name


def record_layers(runner: Any) -> tuple[LayerSpec, ...]:  # noqa: ANN401  # SGLang's ModelRunner
    """The decoder layers of a runner's model on this rank, in the order of their ids.

    Raises InvalidInput for a layer with a feature that no `LayerSpec` has.
    """
    found = {layer.layer_id: spec_of(layer, owner, runner) for owner, layer in _layers(runner)}
    if not found:
        raise InvalidInput("model", got="no attention layer", expected="at least one")
    return tuple(found[layer_id] for layer_id in sorted(found))


def _layers(runner: Any) -> Iterator[tuple[torch.nn.Module, RadixAttention]]:  # noqa: ANN401
    """(owner, layer). An MLA model has a second, expanded layer of the same id, which this
    package has SGLang not call."""
    for owner in runner.model.modules():
        for layer in owner.children():
            if not isinstance(layer, RadixAttention):
                continue
            if runner.use_mla_backend and layer.tp_k_head_num != 1:
                continue
            yield owner, layer


def spec_of(layer: RadixAttention, owner: torch.nn.Module, runner: Any) -> LayerSpec:  # noqa: ANN401
    """One layer. owner: the module that holds it, and its sinks where it has any."""
    _refuse(layer)
    is_latent = runner.use_mla_backend
    sinks = getattr(owner, "sinks", None)
    return LayerSpec(
        layer_id=layer.layer_id,
        kind="mla" if is_latent else "mha",
        tp_q_head_num=layer.tp_q_head_num,
        tp_k_head_num=layer.tp_k_head_num,
        tp_v_head_num=layer.tp_v_head_num,
        qk_head_dim=layer.qk_head_dim,
        v_head_dim=layer.v_head_dim,
        scaling=layer.scaling,
        logit_cap=layer.logit_cap or 0.0,
        sliding_window_size=layer.sliding_window_size,
        attention_chunk_size=(runner.attention_chunk_size or 0) if layer.use_irope else 0,
        sinks=None if sinks is None else sinks.detach().float(),
        k_scale=layer.k_scale_float,
        v_scale=layer.v_scale_float,
    )


def _refuse(layer: RadixAttention) -> None:
    """Raise InvalidInput for a feature that no spec has."""
    features = {
        f"attention of type {layer.attn_type.value}": layer.attn_type != AttentionType.DECODER,
        "cross-attention": layer.is_cross_attention,
        f"positions encoded by {layer.pos_encoding_mode}": layer.pos_encoding_mode != "NONE",
        f"logits capped by {layer.logit_capping_method}": layer.logit_cap > 0
        and layer.logit_capping_method != "tanh",
        "a temperature by length (xAI)": layer.xai_temperature_len > 0,
    }
    for feature, has in features.items():
        if has:
            expected = "causal self-attention: take another --attention-backend"
            raise InvalidInput(f"layer {layer.layer_id}", got=feature, expected=expected)


def request_of(
    layers: Sequence[LayerSpec],
    runner: Any,  # noqa: ANN401  # SGLang's ModelRunner
    *,
    kv_dtype: torch.dtype,
    phases: tuple[str, ...],
) -> Request:
    """The needs of a runner's layers. Where windows or chunks differ, the largest counts.

    phases: those that SGLang has attnmux serve; empty for all.
    Raises InvalidInput where heads or dims differ between the layers.
    """
    first = layers[0]
    for name in ("tp_q_head_num", "tp_k_head_num", "qk_head_dim", "v_head_dim"):
        values = sorted({getattr(layer, name) for layer in layers})
        if len(values) > 1:
            raise InvalidInput(name, got=f"{values} in one model", expected="the same everywhere")
    args = runner.server_args
    speculates = args.speculative_algorithm is not None
    given: dict[str, Any] = {
        "kind": first.kind,
        "num_q_heads": first.tp_q_head_num,
        "num_kv_heads": first.tp_k_head_num,
        "head_dim": first.qk_head_dim,
        "v_head_dim": None if first.v_head_dim == first.qk_head_dim else first.v_head_dim,
        "dtype": dtype_name(runner.dtype),
        "kv_dtype": dtype_name(kv_dtype),
        "page_size": runner.page_size,
        "phases": phases,
        "sliding_window": _largest(layer.sliding_window_size for layer in layers),
        "attention_chunk": max(layer.attention_chunk_size for layer in layers) or None,
        "logit_cap": max(layer.logit_cap for layer in layers) or None,
        "sinks": any(layer.sinks is not None for layer in layers),
        "deterministic": bool(args.enable_deterministic_inference),
        "spec_topk": args.speculative_eagle_topk or 1 if speculates else None,
        "spec_draft_tokens": args.speculative_num_draft_tokens if speculates else None,
        "custom_mask": speculates and (args.speculative_eagle_topk or 1) > 1,
        "speculative_attention_mode": args.speculative_attention_mode,
    }
    if first.kind == "mla":
        text = runner.model_config
        given |= {
            "num_kv_heads": 1,
            "head_dim": text.qk_nope_head_dim + text.qk_rope_head_dim,
            "v_head_dim": text.v_head_dim,
            "kv_lora_rank": first.v_head_dim,
            "qk_rope_head_dim": first.qk_rope_head_dim,
        }
    return Request().replace(origin="model", **given)


def _largest(windows: Iterator[int]) -> int | None:
    return max((window for window in windows if window >= 0), default=None)
