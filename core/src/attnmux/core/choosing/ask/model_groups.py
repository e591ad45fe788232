"""The values of each attention layer, in models whose layers differ in heads or dims."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attnmux.core.choosing.ask.model_layers import ATTENTION, UNRESTRICTED, WINDOWED
from attnmux.core.choosing.common.checks import is_whole

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
    differing = {name for own in _stated(values).values() for name in own} & SHAPES
    for names in (OF_FULL_LAYERS, OF_WINDOW_LAYERS):
        for own, name in names.items():
            if values.get(own) not in (None, values.get(name)):
                differing.add(name)
    other = values.get("attention_other_setting")  # Step's windowed layers
    if isinstance(other, dict):
        differing |= {n for n in SHAPES & other.keys() if other[n] != values.get(n, other[n])}
    for name in LISTED:
        each = values.get(name)
        if isinstance(each, list) and any(one != each[0] for one in each):
            differing.add(name)
    groups = {part.get("n_heads_in_group") for part in _pruned(values)}
    return differing | ({"num_key_value_heads"} if len(groups - {None}) > 1 else set())


def attention_layers(values: Mapping[str, Any]) -> list[LayerValues]:
    """Each attention layer, in order; [] where config.json does not say which layer has what."""
    types: Sequence[str] = values["layer_types"]
    count = _count(values)
    by_type = any(values.get(name) is not None for name in (*OF_FULL_LAYERS, *OF_WINDOW_LAYERS))
    if count is None or ((by_type or "attention_other_setting" in values) and not types):
        return []
    kinds = list(types) or [""] * count
    stated, blocks = _stated(values), _pruned(values)
    found: list[LayerValues] = []
    for place, kind in enumerate(kinds):
        own = {**_of_type(values, kind), **_listed(values, place), **stated.get(place, {})}
        block = blocks[place] if blocks else {}
        group, heads = block.get("n_heads_in_group"), values.get("num_attention_heads")
        if isinstance(group, int) and isinstance(heads, int) and is_whole(group, 1):
            own["num_key_value_heads"] = heads // group
        attends = not blocks or group is not None
        if attends and (not kind or kind in ATTENTION):
            found.append((kind, {name: own[name] for name in own if name in SHAPES}))
    return found


def _count(values: Mapping[str, Any]) -> int | None:
    """The number of layers; None where it is unknown, or where lists have other lengths."""
    listed = [values[name] for name in LISTED if isinstance(values.get(name), list)]
    counts = {len(each) for each in (values["layer_types"], *listed, _pruned(values)) if each}
    stated = values.get("num_hidden_layers")
    if not counts and isinstance(stated, int) and is_whole(stated, 1):
        counts = {stated}
    return counts.pop() if len(counts) == 1 else None


def _of_type(values: Mapping[str, Any], kind: str) -> dict[str, Any]:
    windowed = kind in WINDOWED
    names = OF_WINDOW_LAYERS if windowed else OF_FULL_LAYERS if kind in UNRESTRICTED else {}
    own = {name: values[given] for given, name in names.items() if values.get(given) is not None}
    if values.get("attention_k_eq_v") is False:  # Gemma 4 then ignores its own KV heads
        own.pop("num_key_value_heads", None)
    other = values.get("attention_other_setting")
    if isinstance(other, dict):
        stated = other if windowed else values
        renamed = {**stated, "num_key_value_heads": stated.get("num_attention_groups")}
        own.update((name, renamed[name]) for name in SHAPES if renamed.get(name) is not None)
    return own


def _listed(values: Mapping[str, Any], place: int) -> dict[str, Any]:
    return {
        name: values[given][place]
        for given, name in LISTED.items()
        if isinstance(values.get(given), list)
    }


def _stated(values: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
    """`per_layer_config` by the number of the layer, which JSON has as text."""
    layers = values.get("per_layer_config")
    items = layers.items() if isinstance(layers, dict) else ()
    return {int(key): own for key, own in items if str(key).isdecimal() and isinstance(own, dict)}


def _pruned(values: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The attention of each block, in models that an architecture search has pruned: some have
    none."""
    blocks = values.get("block_configs") or ()
    parts = [block.get("attention") for block in blocks if isinstance(block, dict)]
    return [part if isinstance(part, dict) else {} for part in parts]
