"""The kinds of a model's layers, from its config.json: attention, and layers of other kinds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from itertools import cycle, islice
from typing import Any

from attnmux.configs.families import FAMILIES, PLAIN, family_of
from attnmux.core import InvalidInput, Request

COMPRESSED = frozenset({"compressed_sparse_attention", "heavily_compressed_attention"})
"""Kinds of layers that see a window and keys that stand for blocks of tokens (DeepSeek-V4)."""
WINDOWED = frozenset({"sliding_attention", "hybrid_sliding"}) | COMPRESSED
CHUNKED = frozenset({"chunked_attention"})
INDEXED = frozenset({"indexed_attention", "deepseek_sparse_attention"})
PICKED_BLOCKS = frozenset({"minimax_m3_sparse"})
"""Kinds of layers whose indexer picks blocks of keys, for each KV head."""
UNRESTRICTED = frozenset({"full_attention", "attention", "hybrid"})
ATTENTION = WINDOWED | CHUNKED | INDEXED | PICKED_BLOCKS | UNRESTRICTED

UNNAMED = frozenset({"linear_attention", "mamba", "recurrent"})
"""Words for recurrent layers whose kind the model type tells."""

LINEAR = UNNAMED.union(Request.LINEAR_KINDS)
"""Types of layers that mix tokens without softmax attention."""

NO_MIXING = frozenset({"moe", "mlp"})

BESIDE = {"hybrid": "mamba", "hybrid_sliding": "mamba"}
"""Kinds whose layers have attention and a layer of another kind side by side."""

PATTERN = {"M": "mamba2", "*": "attention", "-": "mlp", "E": "moe"}
"""Letters of Nemotron-H's pattern."""

MOST_LAYERS = 10_000


def is_whole(value: object, least: int = 0) -> bool:
    """Whether `value` is an integer of at least `least`. A bool is none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def layer_types(values: Mapping[str, Any]) -> list[str]:
    """The kind of each layer; [] if the config.json leaves them to its class.

    Raises InvalidInput for kinds that are not text, and for a count that is missing or too large.
    """
    stated = values.get("layer_types") or values.get("layers_block_type") or []
    if not isinstance(stated, list) or not all(isinstance(name, str) for name in stated):
        got = f"layer_types={stated!r}"
        raise InvalidInput("model", got=got, expected="a list of layer_types, or none")
    derived = stated or _flagged(values) or _compressed(values) or _periodic(values)
    derived = derived or _derived(values)
    return _budgeted(derived, values)


def _budgeted(types: list[str], values: Mapping[str, Any]) -> list[str]:
    """If indexers have a budget of keys and pick blocks of them, all attention layers do
    (Qwen4-Exp)."""
    if not values.get("indexer_budget"):
        return types
    (picked,) = PICKED_BLOCKS
    return [picked if kind in UNRESTRICTED | INDEXED else kind for kind in types]


def _flagged(values: Mapping[str, Any]) -> list[str]:
    """From MiniMax-M3's flags of layers with an indexer."""
    sparse = values.get("sparse_attention_config")
    flags = _list(sparse, "sparse_attention_freq") if isinstance(sparse, dict) else None
    return ["minimax_m3_sparse" if flag else "full_attention" for flag in flags or []]


def _derived(values: Mapping[str, Any]) -> list[str]:
    """From the words of model types that do not list their layers."""
    for name, (kind, layers_by) in WORDS.items():
        word = values.get(name)
        if isinstance(word, kind) and (kind is not int or is_whole(word, 1)):
            return layers_by(word, values)
    every = family_of(values).every_layer
    return [every] * _count(values) if every else []


def _periodic(values: Mapping[str, Any]) -> list[str]:
    """By the family's period, if the config.json states the size of windows or chunks."""
    period, kind, size = family_of(values).period
    if not values.get(size) or not is_whole(values.get("num_hidden_layers"), 1):
        return []
    stated = values.get("sliding_window_pattern")
    if isinstance(stated, int) and is_whole(stated, 1):
        period = stated
    count = _count(values)
    return ["full_attention" if (place + 1) % period == 0 else kind for place in range(count)]


def _compressed(values: Mapping[str, Any]) -> list[str]:
    """From DeepSeek-V4's tokens for each key of a block, or by the rule of its class."""
    if values.get("model_type") != "deepseek_v4":
        return []
    count, (sparse, heavy) = _count(values), sorted(COMPRESSED)
    if (ratios := _list(values, "compress_ratios")) is not None:  # drafting layers come last
        of_ratio = {0: "sliding_attention", 4: sparse, 128: heavy}
        return [of_ratio.get(ratio, f"compress_ratios {ratio}") for ratio in ratios[:count]]
    return [sparse if place % 2 and place > 1 else heavy for place in range(count)]


def _list(values: Mapping[str, Any], name: str) -> list[Any] | None:
    value = values.get(name)
    return list(value) if isinstance(value, (list, tuple)) else None


def _placed(values: Mapping[str, Any], attends: Callable[[int], bool], other: str) -> list[str]:
    count = _count(values)
    return ["attention" if attends(place) else other for place in range(count)]


def _count(values: Mapping[str, Any]) -> int:
    count = next((n for name in ("num_hidden_layers", "n_layer") if (n := values.get(name))), None)
    if not isinstance(count, int) or not is_whole(count, 1) or count > MOST_LAYERS:
        got = f"num_hidden_layers={count!r}"
        expected = f"a positive num_hidden_layers of {MOST_LAYERS:,} at most"
        raise InvalidInput("model", got=got, expected=expected)
    return count


def _flags(flags: list[Any], _: Mapping[str, Any]) -> list[str]:
    return ["sliding_attention" if flag else "full_attention" for flag in flags]


def _repeated(parts: list[Any], _: Mapping[str, Any]) -> list[str]:
    """From [[["global", "local"], 12]]."""
    kinds: list[Any] = []
    for part in parts:
        names, times = part if isinstance(part, list) and len(part) == 2 else ((), 0)
        if not isinstance(names, list) or not is_whole(times, 1):
            got = f"attention_types={parts!r}"
            raise InvalidInput("model", got=got, expected="pairs of kinds and a number")
        kinds += names * times
    return ["sliding_attention" if kind == "local" else "full_attention" for kind in kinds]


def _cycle(kinds: list[Any], values: Mapping[str, Any]) -> list[str]:
    known = ["sliding_attention" if kind == "attention" else str(kind) for kind in kinds]
    return list(islice(cycle(known), _count(values))) if known else []


def _grouped(size: int, values: Mapping[str, Any]) -> list[str]:
    """The last layer of each group, and those that fill no group, attend."""
    whole = _count(values) // size * size
    return _placed(values, lambda at: (at + 1) % size == 0 or at >= whole, "lightning")


def _stepped(step: int, values: Mapping[str, Any]) -> list[str]:
    """The layer in the middle of each step attends in a window, unless it is listed."""
    unrestricted = _list(values, "full_attention_idx") or []
    kinds = _placed(values, lambda at: at % step == step // 2, "mamba2")
    return [
        "sliding_attention" if kind == "attention" and at not in unrestricted else kind
        for at, kind in enumerate(kinds)
    ]


WORDS: Mapping[str, tuple[type, Callable[[Any, Mapping[str, Any]], list[str]]]] = {
    # Nemotron-H
    "hybrid_override_pattern": (
        str,
        lambda word, _: [PATTERN.get(letter, letter) for letter in word],
    ),
    "hybrid_layer_pattern": (list, _flags),  # MiMo-V2-Flash
    "attention_types": (list, _repeated),  # GPT-Neo
    "block_types": (list, _cycle),  # RecurrentGemma
    # Jamba
    "attn_layer_period": (
        int,
        lambda period, values: _placed(
            values, lambda at: at % period == (values.get("attn_layer_offset") or 0), "mamba1"
        ),
    ),
    # LFM2
    "full_attn_idxs": (list, lambda at, values: _placed(values, at.__contains__, "conv")),
    # Bamba
    "attn_layer_indices": (list, lambda at, values: _placed(values, at.__contains__, "mamba2")),
    # MiniMax-Text-01
    "attn_type_list": (
        list,
        lambda kinds, _: ["attention" if kind == 1 else "lightning" for kind in kinds],
    ),
    # Kimi-Linear counts from 1
    "linear_attn_config": (
        dict,
        lambda word, values: _placed(
            values, lambda at: at + 1 in (word.get("full_attn_layers") or []), "kda"
        ),
    ),
    "layer_group_size": (int, _grouped),  # Ring-linear
    "mamba_step": (int, _stepped),  # PLaMo 2
    # Qwen3-Next
    "full_attention_interval": (
        int,
        lambda period, values: _placed(values, lambda at: (at + 1) % period == 0, "gdn"),
    ),
}
"""A word that places the kinds of layers, its type, and the layers by it. The first word counts."""


def compressed_layers(types: list[str]) -> tuple[tuple[str, int], ...]:
    """(kind, how many) of the layers that see keys of blocks, by name."""
    return tuple(sorted(Counter(kind for kind in types if kind in COMPRESSED).items()))


def linear_layers(types: list[str], model_type: str) -> tuple[tuple[str, int], ...]:
    """(kind, how many) of the layers without softmax attention, by name. An unknown layer type
    keeps its name from config.json."""
    named = [name for kind in types if (name := BESIDE.get(kind, kind)) in LINEAR]
    recurrent = FAMILIES.get(model_type, PLAIN).recurrent
    counts = Counter(recurrent if recurrent and name in UNNAMED else name for name in named)
    return tuple(sorted(counts.items()))
