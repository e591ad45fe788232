"""Heads and dims of a model's layers, read from its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attnmux.core.choosing.ask.model_layers import BESIDE, LINEAR
from attnmux.core.choosing.common.checks import is_whole
from attnmux.core.errors import InvalidInput

LINEAR_K_DIMS = ("linear_key_head_dim", "linear_head_dim", "mamba_d_state", "ssm_state_size")
LINEAR_V_DIMS = (
    *("linear_value_head_dim", "linear_head_dim"),
    *("mamba_d_head", "mamba_head_dim", "mamba_headdim"),
)
"""Names of the dims of a recurrent layer's heads, in the models that have them."""


def whole(values: Mapping[str, Any], name: str, source: str) -> int:
    number = values.get(name)
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        absent = f"{values.get('model_type') or 'a model'} without {name}"
        got = f"{absent if number is None else f'{name}={number!r}'} in {source}"
        raise InvalidInput("model", got=got, expected=f"a positive {name} in config.json")
    return number


def _q_heads_per_rank(values: Mapping[str, Any], source: str, tp: int) -> int:
    heads = whole(values, "num_attention_heads", source)
    if tp < 1 or heads % tp:
        raise InvalidInput("tp", got=str(tp), expected=f"a divisor of the model's {heads} heads")
    return heads // tp


def attention_heads(values: Mapping[str, Any], source: str, tp: int) -> dict[str, Any]:
    q_heads = _q_heads_per_rank(values, source, tp)
    kv_heads = _kv_heads(values, source)
    if kv_heads % tp and tp % kv_heads:
        expected = f"a divisor or a multiple of the model's {kv_heads} KV heads"
        raise InvalidInput("tp", got=str(tp), expected=expected)
    heads = q_heads * tp
    if heads % kv_heads:
        got = f"{heads} heads over {kv_heads} KV heads in {source}"
        raise InvalidInput("model", got=got, expected="as many heads for each KV head")
    name = "hidden_size" if values.get("head_dim") is None else "head_dim"
    dims = whole(values, name, source)
    head_dim = dims // heads if name == "hidden_size" else dims
    if not head_dim:
        got = f"{name}={dims} for {heads} heads in {source}"
        raise InvalidInput("model", got=got, expected="at least one dimension a head")
    v_head_dim = None if values.get("v_head_dim") is None else whole(values, "v_head_dim", source)
    return {
        # Qwen2.5-1M
        "kind": "dual_chunk" if values.get("dual_chunk_attention_config") else "mha",
        "num_q_heads": q_heads,
        "num_kv_heads": max(1, kv_heads // tp),
        "head_dim": head_dim,
        "v_head_dim": None if v_head_dim == head_dim else v_head_dim,
    }


def _kv_heads(values: Mapping[str, Any], source: str) -> int:
    # Falcon and StarCoder; Falcon's later layout states its groups.
    if values.get("multi_query") and not values.get("new_decoder_architecture"):
        return 1
    stated = values.get("num_key_value_heads") is not None
    return whole(values, "num_key_value_heads" if stated else "num_attention_heads", source)


def latent_heads(values: Mapping[str, Any], source: str, tp: int) -> dict[str, Any]:
    rope = whole(values, "qk_rope_head_dim", source)
    sparse = values.get("index_topk") is not None
    return {
        "kind": "nsa" if sparse else "mla",
        "index_topk": whole(values, "index_topk", source) if sparse else None,
        "num_q_heads": _q_heads_per_rank(values, source, tp),
        "num_kv_heads": 1,
        "head_dim": whole(values, "qk_nope_head_dim", source) + rope,
        "v_head_dim": whole(values, "v_head_dim", source),
        "kv_lora_rank": whole(values, "kv_lora_rank", source),
        "qk_rope_head_dim": rope,
    }


def linear_dims(values: Mapping[str, Any], types: list[str]) -> dict[str, Any]:
    """K and V dims of the recurrent states, where config.json states them."""
    if LINEAR.isdisjoint(BESIDE.get(each, each) for each in types):
        return {}
    nested = values.get("linear_attn_config")
    known = (
        {**values, "linear_head_dim": nested.get("head_dim")}
        if isinstance(nested, dict)
        else values
    )
    found = (
        next((known[name] for name in names if is_whole(known.get(name), 1)), None)
        for names in (LINEAR_K_DIMS, LINEAR_V_DIMS)
    )
    k_dim, v_dim = found
    return {"linear_head_dim": k_dim, "linear_v_head_dim": None if v_dim == k_dim else v_dim}
