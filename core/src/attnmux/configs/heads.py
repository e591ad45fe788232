"""Heads and dims of a model's layers, read from its config.json; also of layers that differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attnmux.configs.layers import ATTENTION, BESIDE, LINEAR, UNRESTRICTED, WINDOWED, is_whole
from attnmux.core import InvalidInput

LINEAR_K_DIMS = ("linear_key_head_dim", "linear_head_dim", "mamba_d_state", "ssm_state_size")
LINEAR_V_DIMS = (
    *("linear_value_head_dim", "linear_head_dim"),
    *("mamba_d_head", "mamba_head_dim", "mamba_headdim"),
)
"""Names of the dims of a recurrent layer's heads, in the models that have them."""


def whole(values: Mapping[str, Any], name: str, where: str = "") -> int:
    number = values.get(name)
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        absent = f"{values.get('model_type') or 'a model'} without {name}"
        got = f"{absent if number is None else f'{name}={number!r}'}{where}"
        raise InvalidInput("model", got=got, expected=f"a positive {name} in config.json")
    return number


def _q_heads_per_rank(values: Mapping[str, Any], tp: int) -> int:
    heads = whole(values, "num_attention_heads")
    if tp < 1 or heads % tp:
        raise InvalidInput("tp", got=str(tp), expected=f"a divisor of the model's {heads} heads")
    return heads // tp


def attention_heads(values: Mapping[str, Any], tp: int) -> dict[str, Any]:
    q_heads = _q_heads_per_rank(values, tp)
    kv_heads = _kv_heads(values)
    if kv_heads % tp and tp % kv_heads:
        expected = f"a divisor or a multiple of the model's {kv_heads} KV heads"
        raise InvalidInput("tp", got=str(tp), expected=expected)
    heads = q_heads * tp
    if heads % kv_heads:
        got = f"{heads} heads over {kv_heads} KV heads"
        raise InvalidInput("model", got=got, expected="as many heads for each KV head")
    name = "hidden_size" if values.get("head_dim") is None else "head_dim"
    dims = whole(values, name)
    head_dim = dims // heads if name == "hidden_size" else dims
    if not head_dim:
        got = f"{name}={dims} for {heads} heads"
        raise InvalidInput("model", got=got, expected="at least one dimension a head")
    v_head_dim = whole(values, "v_head_dim") if values.get("v_head_dim") else None
    return {
        # Qwen2.5-1M
        "kind": "dual_chunk" if values.get("dual_chunk_attention_config") else "mha",
        "num_q_heads": q_heads,
        "num_kv_heads": max(1, kv_heads // tp),
        "head_dim": head_dim,
        "v_head_dim": None if v_head_dim == head_dim else v_head_dim,
    }


def _kv_heads(values: Mapping[str, Any]) -> int:
    # Falcon and StarCoder; Falcon's later layout states its groups.
    if values.get("multi_query") and not values.get("new_decoder_architecture"):
        return 1
    stated = values.get("num_key_value_heads") is not None
    return whole(values, "num_key_value_heads" if stated else "num_attention_heads")


def latent_heads(values: Mapping[str, Any], tp: int) -> dict[str, Any]:
    rope = whole(values, "qk_rope_head_dim")
    sparse = values.get("index_topk") is not None
    return {
        "kind": "nsa" if sparse else "mla",
        "index_topk": whole(values, "index_topk") if sparse else None,
        "num_q_heads": _q_heads_per_rank(values, tp),
        "num_kv_heads": 1,
        "head_dim": whole(values, "qk_nope_head_dim") + rope,
        "v_head_dim": whole(values, "v_head_dim"),
        "kv_lora_rank": whole(values, "kv_lora_rank"),
        "qk_rope_head_dim": rope,
    }


def linear_dims(values: Mapping[str, Any], types: list[str]) -> dict[str, Any]:
    """K and V dims of the recurrent states, if config.json states them."""
    if LINEAR.isdisjoint(BESIDE.get(kind, kind) for kind in types):
        return {}
    nested = values.get("linear_attn_config")
    known = (
        {**values, "linear_head_dim": nested.get("head_dim")}
        if isinstance(nested, dict)
        else values
    )
    dims = (
        next((known[name] for name in names if is_whole(known.get(name), 1)), None)
        for names in (LINEAR_K_DIMS, LINEAR_V_DIMS)
    )
    k_dim, v_dim = dims
    return {"linear_head_dim": k_dim, "linear_v_head_dim": None if v_dim == k_dim else v_dim}


SHAPES = frozenset(
    {
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "v_head_dim",
        "kv_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
    }
)
"""The values that make a layer's shape."""

LISTED: Mapping[str, str] = {
    **{name: name for name in ("num_attention_heads", "num_key_value_heads")},
    "num_query_heads": "num_attention_heads",  # OpenELM
    "num_kv_heads": "num_key_value_heads",
}
"""Names of values that may be a list with one for each layer."""

OF_FULL_LAYERS: Mapping[str, str] = {
    "global_head_dim": "head_dim",
    "num_global_key_value_heads": "num_key_value_heads",
}
OF_WINDOW_LAYERS: Mapping[str, str] = {
    "swa_num_attention_heads": "num_attention_heads",
    "swa_num_key_value_heads": "num_key_value_heads",
    "swa_head_dim": "head_dim",
    "swa_v_head_dim": "v_head_dim",
}
"""Names that model types give to the shapes of their unwindowed or windowed layers alone."""

LayerValues = tuple[str, Mapping[str, Any]]
"""The type of a layer, or "", and the values of shapes that it has of its own."""


def differing_shapes(values: Mapping[str, Any]) -> set[str]:
    """The shapes in which layers differ, by the names in config.json."""
    differing = {name for stated in _stated(values).values() for name in stated} & SHAPES
    for names in (OF_FULL_LAYERS, OF_WINDOW_LAYERS):
        for own, name in names.items():
            if values.get(own) not in (None, values.get(name)):
                differing.add(name)
    other = values.get("attention_other_setting")  # Step's windowed layers
    if isinstance(other, dict):
        differing |= {n for n in SHAPES & other.keys() if other[n] != values.get(n, other[n])}
    for name in LISTED:
        listed_values = values.get(name)
        if isinstance(listed_values, list) and any(
            value != listed_values[0] for value in listed_values
        ):
            differing.add(name)
    groups = {part.get("n_heads_in_group") for part in _pruned(values)}
    return differing | ({"num_key_value_heads"} if len(groups - {None}) > 1 else set())


def attention_layers(values: Mapping[str, Any]) -> dict[int, LayerValues]:
    """Each attention layer by its number in the model, in order; {} if config.json does not say
    which layer has what."""
    types: Sequence[str] = values["layer_types"]
    count = _count(values)
    by_type = any(values.get(name) is not None for name in (*OF_FULL_LAYERS, *OF_WINDOW_LAYERS))
    if count is None or ((by_type or "attention_other_setting" in values) and not types):
        return {}
    kinds = list(types) or [""] * count
    stated, blocks = _stated(values), _pruned(values)
    layers: dict[int, LayerValues] = {}
    for place, kind in enumerate(kinds):
        shape = {**_of_type(values, kind), **_listed(values, place), **stated.get(place, {})}
        block = blocks[place] if blocks else {}
        group, heads = block.get("n_heads_in_group"), values.get("num_attention_heads")
        if isinstance(group, int) and isinstance(heads, int) and is_whole(group, 1):
            shape["num_key_value_heads"] = heads // group
        attends = not blocks or group is not None
        if attends and (not kind or kind in ATTENTION):
            layers[place] = kind, {name: shape[name] for name in shape if name in SHAPES}
    return layers


def _count(values: Mapping[str, Any]) -> int | None:
    """The number of layers; None if it is unknown, or if lists have other lengths."""
    listed = [values[name] for name in LISTED if isinstance(values.get(name), list)]
    counts = {
        len(listing) for listing in (values["layer_types"], *listed, _pruned(values)) if listing
    }
    stated = values.get("num_hidden_layers")
    if not counts and isinstance(stated, int) and is_whole(stated, 1):
        counts = {stated}
    return counts.pop() if len(counts) == 1 else None


def _of_type(values: Mapping[str, Any], kind: str) -> dict[str, Any]:
    windowed = kind in WINDOWED
    names = OF_WINDOW_LAYERS if windowed else OF_FULL_LAYERS if kind in UNRESTRICTED else {}
    shape = {name: values[given] for given, name in names.items() if values.get(given) is not None}
    if values.get("attention_k_eq_v") is False:  # Gemma 4 then ignores its own KV heads
        shape.pop("num_key_value_heads", None)
    other = values.get("attention_other_setting")
    if isinstance(other, dict):
        stated = other if windowed else values
        renamed = {**stated, "num_key_value_heads": stated.get("num_attention_groups")}
        shape.update((name, renamed[name]) for name in SHAPES if renamed.get(name) is not None)
    return shape


def _listed(values: Mapping[str, Any], place: int) -> dict[str, Any]:
    return {
        name: values[listed][place]
        for listed, name in LISTED.items()
        if isinstance(values.get(listed), list)
    }


def _stated(values: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
    """`per_layer_config` by the number of the layer, which JSON has as text."""
    layers = values.get("per_layer_config")
    items = layers.items() if isinstance(layers, dict) else ()
    return {
        int(key): stated
        for key, stated in items
        if str(key).isdecimal() and isinstance(stated, dict)
    }


def _pruned(values: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The attention of each block, in models that an architecture search has pruned: some have
    none."""
    blocks = values.get("block_configs") or ()
    parts = [block.get("attention") for block in blocks if isinstance(block, dict)]
    return [part if isinstance(part, dict) else {} for part in parts]
