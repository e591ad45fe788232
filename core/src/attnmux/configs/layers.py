"""The kinds of a model's layers, from its config.json: attention, and layers of other kinds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import cycle, islice
from typing import Any

from attnmux.core import InvalidInput, Request

COMPRESSED = frozenset({"compressed_sparse_attention", "heavily_compressed_attention"})
"""Of layers that see a window and keys that stand for blocks of tokens (DeepSeek-V4)."""
WINDOWED = frozenset({"sliding_attention", "hybrid_sliding"}) | COMPRESSED
CHUNKED = frozenset({"chunked_attention"})
INDEXED = frozenset({"indexed_attention", "deepseek_sparse_attention"})
PICKED_BLOCKS = frozenset({"minimax_m3_sparse"})
"""Of layers whose indexer picks blocks of keys, for each KV head."""
UNRESTRICTED = frozenset({"full_attention", "attention", "hybrid"})
ATTENTION = WINDOWED | CHUNKED | INDEXED | PICKED_BLOCKS | UNRESTRICTED

UNNAMED = frozenset({"linear_attention", "mamba", "recurrent"})
"""Words for recurrent layers whose kind the model type tells."""

LINEAR = UNNAMED.union(Request.LINEAR_KINDS)
"""Types of layers that mix tokens without softmax attention."""

KIND_OF: Mapping[str, str] = {
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_text", "olmo_hybrid"), "gdn"),
    **dict.fromkeys(("qwen3_5_moe", "qwen3_5_moe_text", "qwen4_exp", "qwen4_exp_text"), "gdn"),
    **dict.fromkeys(("kimi_linear", "glm5_next", "glm5_next_text", "bailing_hybrid"), "kda"),
    **dict.fromkeys(("minimax", "minimax_text_01"), "lightning"),
    **dict.fromkeys(("bamba", "falcon_h1", "nemotron_h", "granitemoehybrid"), "mamba2"),
    **dict.fromkeys(("zamba2", "mamba2", "xlstm"), "mamba2"),
    **dict.fromkeys(("jamba", "zamba", "mamba", "falcon_mamba", "recurrent_gemma"), "mamba1"),
    "zaya": "conv",
}
"""The kind of a model type's recurrent layers, which its config.json calls "linear_attention",
"mamba" or "recurrent". Source: the functions that the models of transformers 5.23 call."""

NO_MIXING = frozenset({"moe", "mlp"})

BESIDE = {"hybrid": "mamba", "hybrid_sliding": "mamba"}
"""Kinds whose layers have attention and a layer of another kind side by side."""

UNIFORM = {
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba"), "mamba"),
    **dict.fromkeys(("rwkv", "xlstm"), "recurrent"),
    "falcon_h1": "hybrid",
}
"""Model types all of whose layers are of one kind that their config.json does not state."""

PERIODS = {
    "gemma2": (2, "sliding_attention", "sliding_window"),
    "gemma3_text": (6, "sliding_attention", "sliding_window"),
    "cohere2": (4, "sliding_attention", "sliding_window"),
    "llama4_text": (4, "chunked_attention", "attention_chunk_size"),
}
"""Model types that may leave their layers to their class: the layers of a period, of which the
last sees everything, the kind of the others, and the value that limits them. Source: their
configurations in transformers 5.23."""

PATTERN = {"M": "mamba2", "*": "attention", "-": "mlp", "E": "moe"}
"""Letters of Nemotron-H's pattern."""

MOST_LAYERS = 10_000


def is_whole(value: object, least: int = 0) -> bool:
    """Whether `value` is an integer of at least `least`. A bool is none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def layer_types(values: Mapping[str, Any]) -> list[str]:
    """The kind of each layer; [] where the config.json leaves them to its class.

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
    """Where indexers have a budget of keys and pick blocks of them, all attention layers do
    (Qwen4-Exp)."""
    if not values.get("indexer_budget"):
        return types
    (picked,) = PICKED_BLOCKS
    return [picked if each in UNRESTRICTED | INDEXED else each for each in types]


def _flagged(values: Mapping[str, Any]) -> list[str]:
    """From MiniMax-M3's flags of layers with an indexer."""
    sparse = values.get("sparse_attention_config")
    flags = _list(sparse, "sparse_attention_freq") if isinstance(sparse, dict) else None
    return ["minimax_m3_sparse" if flag else "full_attention" for flag in flags or []]


def _derived(values: Mapping[str, Any]) -> list[str]:
    """From the words of model types that do not list their layers."""
    model_type = str(values.get("model_type", ""))
    if isinstance(pattern := values.get("hybrid_override_pattern"), str) and pattern:
        return [PATTERN.get(letter, letter) for letter in pattern]
    if blocks := _list(values, "block_types"):  # RecurrentGemma repeats them
        known = ["sliding_attention" if each == "attention" else str(each) for each in blocks]
        return list(islice(cycle(known), _count(values)))
    if is_whole(period := values.get("attn_layer_period"), 1):  # Jamba
        offset = values.get("attn_layer_offset") or 0
        return _placed(values, lambda place: place % period == offset, "mamba1")
    if (places := _list(values, "full_attn_idxs")) is not None:
        return _placed(values, lambda place: place in places, "conv")  # LFM2
    if (places := _list(values, "attn_layer_indices")) is not None:
        return _placed(values, lambda place: place in places, "mamba2")  # Bamba
    if kinds := _list(values, "attn_type_list"):  # MiniMax-Text-01
        return ["attention" if kind == 1 else "lightning" for kind in kinds]
    if isinstance(linear := values.get("linear_attn_config"), dict):  # Kimi-Linear counts from 1
        places = linear.get("full_attn_layers") or []
        return _placed(values, lambda place: place + 1 in places, "kda")
    interval = values.get("full_attention_interval") or (4 if model_type == "qwen3_next" else None)
    if is_whole(interval, 1):
        return _placed(values, lambda place: (place + 1) % interval == 0, "gdn")
    if model_type in UNIFORM:
        return [UNIFORM[model_type]] * _count(values)
    return []


def _periodic(values: Mapping[str, Any]) -> list[str]:
    """By PERIODS, where the config.json states the size of windows or chunks."""
    period, kind, size = PERIODS.get(str(values.get("model_type")), (0, "", ""))
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
    found = values.get(name)
    return list(found) if isinstance(found, (list, tuple)) else None


def _placed(values: Mapping[str, Any], attends: Any, other: str) -> list[str]:  # noqa: ANN401  # a predicate of a place
    count = _count(values)
    return ["attention" if attends(place) else other for place in range(count)]


def _count(values: Mapping[str, Any]) -> int:
    count = next((n for name in ("num_hidden_layers", "n_layer") if (n := values.get(name))), None)
    if not isinstance(count, int) or not is_whole(count, 1) or count > MOST_LAYERS:
        got = f"num_hidden_layers={count!r}"
        expected = f"a positive num_hidden_layers of {MOST_LAYERS:,} at most"
        raise InvalidInput("model", got=got, expected=expected)
    return count


def compressed_layers(types: list[str]) -> tuple[tuple[str, int], ...]:
    """(kind, how many) of the layers that see keys of blocks, by name."""
    return tuple(sorted(Counter(each for each in types if each in COMPRESSED).items()))


def linear_layers(types: list[str], model_type: str) -> tuple[tuple[str, int], ...]:
    """(kind, how many) of the layers without softmax attention, by name. What a model type does not
    tell more precisely keeps the name of its config.json."""
    named = [name for each in types if (name := BESIDE.get(each, each)) in LINEAR]
    own = KIND_OF.get(model_type)
    counts = Counter(own if own and name in UNNAMED else name for name in named)
    return tuple(sorted(counts.items()))
