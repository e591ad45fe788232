"""A model's layers in groups that are alike, read from its config.json: heads, dims and reach."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from attnmux.configs.families import family_of
from attnmux.configs.heads import attention_layers, differing_shapes, whole
from attnmux.configs.layers import CHUNKED, COMPRESSED, PICKED_BLOCKS, WINDOWED
from attnmux.core import LayerGroup

Kept = Callable[[Mapping[int, str]], frozenset[int]]
"""`kept_layers` for the user's `skip`."""


def layer_groups(
    values: Mapping[str, Any],
    heads_of: Callable[..., dict[str, Any]],
    tp: int,
    *,
    dtype: str | None,
    kept: Kept | None,
) -> dict[str, Any]:
    """Heads, dims and reach of all layers; if they differ, of each group of layers.

    kept: finds layers that keep K and V in `dtype`, and are groups of their own; None for none.
    """
    types = frozenset(values["layer_types"])
    # Those of compressed layers come after the keys of blocks, which no backend sees
    has_sinks = bool(family_of(values).sinks) and not (types and types <= COMPRESSED)
    if kept is None and not differing_shapes(values):
        return {
            **heads_of(values, tp),
            **reach(values),
            **_blocks(values),
            "sinks": has_sinks,
        }
    windowed_alone = family_of(values).sinks == "windowed"
    every, kinds = {}, {}
    for place, (kind, shape) in attention_layers(values).items():
        of_layer = {**values, **shape, "layer_types": [kind] if kind else []}
        heads, limits = heads_of(of_layer, tp), reach(of_layer)
        sinks = has_sinks and (limits["sliding_window"] is not None or not windowed_alone)
        every[place] = heads, {**limits, "sinks": sinks}
        kinds[place] = _kind(kind, heads["kind"], limits)
    kept_places = frozenset() if kept is None else kept(kinds)
    alike: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for place, (heads, features) in every.items():
        alike.setdefault((place in kept_places, *heads.items()), []).append(features)
    # The fields of the request are those of layers that do not keep the dtype
    first, *others = sorted(alike.items(), key=lambda group: group[0][0])
    cap = values.get("attn_logit_softcapping")
    groups = [
        LayerGroup(
            layers=len(features),
            logit_cap=cap,
            kv_dtype=dtype if is_kept else None,
            **{name: value for name, value in heads if name != "kind"},
            **_joined(features),
        )
        for (is_kept, *heads), features in others
    ]
    return {**dict(first[0][1:]), **_joined(first[1]), "other_layers": tuple(groups)}


def _kind(kind: str, of_heads: str, limits: Mapping[str, Any]) -> str:
    """The name that `kept_layers` has for a layer of that type in config.json."""
    if of_heads != "mha":
        return of_heads
    if kind in COMPRESSED | PICKED_BLOCKS:
        return kind
    return next(
        (name for name in ("sliding_window", "attention_chunk") if limits[name]), "full_attention"
    )


def _joined(features: list[dict[str, Any]]) -> dict[str, Any]:
    """The needs of layers of one shape together: windows and chunks have one size in a model."""
    return {
        name: next((feature[name] for feature in features if feature[name]), unset)
        for name, unset in (("sliding_window", None), ("attention_chunk", None), ("sinks", False))
    }


def reach(values: Mapping[str, Any]) -> dict[str, Any]:
    """Window and chunk, if at least one layer uses them."""
    types = frozenset(values["layer_types"])
    windowed = bool(types & WINDOWED) if types else _any_layer_windowed(values)
    chunked = bool(types & CHUNKED) if types else True
    # A layer's type requires its value.
    read: Callable[..., int | None] = whole if types else _size
    window = read(values, "sliding_window") if windowed else None
    return {
        # transformers' window of n keys includes the query's own
        "sliding_window": None if window is None else window - 1,
        "attention_chunk": read(values, "attention_chunk_size") if chunked else None,
    }


def _blocks(values: Mapping[str, Any]) -> dict[str, Any]:
    """The picks of the indexers of at least one layer. The later names are MiniMax-M3's own."""
    if PICKED_BLOCKS.isdisjoint(values["layer_types"]):
        return {}
    if values.get("indexer_budget"):  # Qwen4-Exp's, in keys
        size = whole(values, "indexer_compress_ratio")
        return {
            "index_topk": whole(values, "indexer_budget") // size,
            "index_block_size": size,
        }
    own = values.get("sparse_attention_config")
    known = {**own, **values} if isinstance(own, dict) else values
    fields = {
        "index_topk": ("index_topk_blocks", "sparse_topk_blocks"),
        "index_block_size": ("index_block_size", "sparse_block_size"),
    }
    return {
        field: whole(known, own if known.get(name) is None else name)
        for field, (name, own) in fields.items()
    }


def _size(values: Mapping[str, Any], name: str) -> int | None:
    """None if the feature is off: absent, null or 0."""
    return whole(values, name) if values.get(name) else None


def _any_layer_windowed(values: Mapping[str, Any]) -> bool:
    if values.get("use_sliding_window") is False:
        return False
    first, layers = values.get("max_window_layers"), values.get("num_hidden_layers")
    return not (isinstance(first, int) and isinstance(layers, int)) or first < layers
