"""SGLang's attention layers in attnmux's words: layer specs and the request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.configs.model_config import is_deepseek_dsa
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.runtime_context import get_exec, get_spec

from attnmux.core import InvalidInput, LayerGroup, LayerSpec, Request
from attnmux.sglang.asking import OTHER, refuse


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


def sink_owners(runner: Any, layers: Sequence[LayerSpec]) -> list[torch.nn.Module]:  # noqa: ANN401
    """The module that has the weights `sinks`, for each layer with sinks."""
    owners = {layer.layer_id: owner for owner, layer in _layers(runner)}
    return [owners[layer.layer_id] for layer in layers if layer.sinks is not None]


def spec_of(layer: RadixAttention, owner: torch.nn.Module, runner: Any) -> LayerSpec:  # noqa: ANN401
    """One layer. owner: the module that holds it, and its sinks if it has any."""
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
    is_decoders = layer.attn_type == AttentionType.DECODER
    refuse(
        Request(
            phases=("extend", "decode") if is_decoders else ("encoder",),
            cross_attention=layer.is_cross_attention,
            alibi=layer.pos_encoding_mode == "ALIBI",
        )
    )
    features = {
        f"positions encoded by {layer.pos_encoding_mode}": layer.pos_encoding_mode != "NONE",
        f"logits capped by {layer.logit_capping_method}": layer.logit_cap > 0
        and layer.logit_capping_method != "tanh",
        "a temperature by length (xAI)": layer.xai_temperature_len > 0,
    }
    for feature, has in features.items():
        if has:
            expected = f"causal self-attention: {OTHER}"
            raise InvalidInput(f"layer {layer.layer_id}", got=feature, expected=expected)


def request_of(
    layers: Sequence[LayerSpec],
    runner: Any,  # noqa: ANN401  # SGLang's ModelRunner
    *,
    phases: tuple[str, ...],
) -> Request:
    """The needs of a runner's layers. If windows or chunks differ, the largest counts.

    phases: those that SGLang has attnmux serve; empty for all.
    Raises InvalidInput for a window of one token, which SGLang's layers do not have.
    """
    if runner.sliding_window_size == 0:
        expected = f"2 tokens or more: SGLang leaves out a window of 1: {OTHER}"
        raise InvalidInput("sliding_window", got=1, expected=expected)
    first, *others = _shapes(layers)
    spec, config = get_spec(), runner.model_config
    topk = (spec.speculative_eagle_topk or 1) if spec.speculative_algorithm else None
    given: dict[str, Any] = {
        "kind": "nsa" if is_deepseek_dsa(config.hf_config) else first.kind,
        "num_q_heads": first.tp_q_head_num,
        "num_kv_heads": first.tp_k_head_num,
        "head_dim": first.qk_head_dim,
        "v_head_dim": None if first.v_head_dim == first.qk_head_dim else first.v_head_dim,
        "dtype": Request.canonical_dtype(runner.dtype),
        "kv_dtype": Request.canonical_dtype(runner.kv_cache_dtype),
        "page_size": runner.page_size,
        "phases": phases,
        "sliding_window": _largest(layer.sliding_window_size for layer in layers),
        "attention_chunk": max(layer.attention_chunk_size for layer in layers) or None,
        "logit_cap": max(layer.logit_cap for layer in layers) or None,
        "sinks": any(layer.sinks is not None for layer in layers),
        "multi_item": bool(getattr(runner.server_args, "enable_mis", False)),
        "deterministic": bool(get_exec().deterministic.enable_deterministic_inference),
        "spec_topk": topk,
        "spec_draft_tokens": spec.speculative_num_draft_tokens if topk else None,
        "speculative_attention_mode": spec.speculative_attention_mode,
    }
    if first.kind == "mla":
        given |= {
            "num_kv_heads": 1,
            "head_dim": config.qk_nope_head_dim + config.qk_rope_head_dim,
            "v_head_dim": config.v_head_dim,
            "kv_lora_rank": first.v_head_dim,
            "qk_rope_head_dim": first.qk_rope_head_dim,
        }
    else:
        given["other_layers"] = tuple(map(_group, others))
    if mambaish_config(config) is not None:
        given["linear_layers"] = (("recurrent", max(config.num_hidden_layers - len(layers), 1)),)
    return Request().replace(origin="model", **given)


def _shapes(layers: Sequence[LayerSpec]) -> list[LayerSpec]:
    """The first layer of each shape."""
    found: dict[tuple[int, ...], LayerSpec] = {}
    for layer in layers:
        heads = layer.tp_q_head_num, layer.tp_k_head_num
        found.setdefault((*heads, layer.qk_head_dim, layer.v_head_dim), layer)
    return list(found.values())


def _group(layer: LayerSpec) -> LayerGroup:
    return LayerGroup(
        layers=1,
        num_q_heads=layer.tp_q_head_num,
        num_kv_heads=layer.tp_k_head_num,
        head_dim=layer.qk_head_dim,
        v_head_dim=layer.v_head_dim,
    )


def _largest(windows: Iterator[int]) -> int | None:
    return max((window for window in windows if window >= 0), default=None)
