"""A request's fields, read from a model's Hugging Face config.json."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from attnmux.core.choosing.ask.model_heads import (
    attention_heads,
    attention_layers,
    differing_shapes,
    latent_heads,
    linear_dims,
    whole,
)
from attnmux.core.choosing.ask.model_layers import (
    ATTENTION,
    CHUNKED,
    COMPRESSED,
    INDEXED,
    LINEAR,
    NO_MIXING,
    PICKED_BLOCKS,
    WINDOWED,
    compressed_layers,
    layer_types,
    linear_layers,
)
from attnmux.core.choosing.ask.model_types import (
    ALIBI,
    DEFAULTS,
    ENCODERS,
    NAMES,
    RELATIVE,
    SINKS,
    UNSAYABLE,
    WINDOW_KV_HEADS,
    WINDOW_SINKS,
)
from attnmux.core.choosing.ask.values import LayerGroup
from attnmux.core.choosing.common.files import read_file
from attnmux.core.errors import InvalidInput

MOST_BYTES = 2**24
"""Of a configuration. The largest that are published have some 100 kB."""
LONGEST_NAME = 200
SPARSE = ("index_topk", "index_topk_blocks", "indexer_budget", "sparse_attention_config")
"""Values of models in which an indexer picks keys."""


def read_model(config: Mapping[str, Any], tp: int) -> dict[str, Any]:
    """The fields of a Request that the model sets.

    Raises InvalidInput for attention that a request cannot express, and for a `tp` that does not
    divide the heads.
    """
    inner = config.get("text_config")
    text = inner if isinstance(inner, dict) else config
    model_type = str(text.get("model_type", config.get("model_type", "")))
    values = {**DEFAULTS.get(model_type, {}), **text}
    for name, own in NAMES.get(model_type, {}).items():
        if values.get(name) is None:
            values[name] = values.get(own)
    kv_heads = values.get("num_key_value_heads")
    if model_type in WINDOW_KV_HEADS and isinstance(kv_heads, int):
        values.setdefault("swa_num_key_value_heads", kv_heads * WINDOW_KV_HEADS[model_type])
    values["model_type"] = model_type
    whole_type = str(config.get("model_type", ""))
    if not {model_type, whole_type}.isdisjoint(ENCODERS) and not values.get("is_decoder"):
        return _encoder(config, values, tp)
    latent = values.get("kv_lora_rank") is not None
    values["layer_types"] = types = layer_types(values)
    _check_sayable(values, latent)
    # Those layers ask for the LSE of their windows
    compressed = compressed_layers(types)
    return {
        "linear_layers": linear_layers(types, model_type),
        **linear_dims(values, types),
        **({"compressed_layers": compressed, "lse": True} if compressed else {}),
        **_attention(values, latent_heads if latent else attention_heads, tp),
        "dtype": _dtype(text) or _dtype(config),
        "alibi": _has_alibi(values),
        "relative_bias": model_type in RELATIVE,
        "logit_cap": values.get("attn_logit_softcapping"),
        "multimodal": isinstance(config.get("vision_config"), dict),
        "encoder_head_dim": _encoder_head_dim(config.get("vision_config")),
        "cross_attention": _has_cross_attention(config, values),
    }


def _attention(
    values: Mapping[str, Any], heads_of: Callable[..., dict[str, Any]], tp: int
) -> dict[str, Any]:
    """Heads, dims and reach of all layers; where they differ, of each group of layers."""
    types = frozenset(values["layer_types"])
    # Those of compressed layers come after the keys of blocks, which no backend sees
    has_sinks = values["model_type"] in SINKS and not (types and types <= COMPRESSED)
    if not differing_shapes(values):
        return {
            **heads_of(values, tp),
            **_layers(values),
            **_blocks(values),
            "sinks": has_sinks,
        }
    windowed_alone = values["model_type"] in WINDOW_SINKS
    every = []
    for kind, own in attention_layers(values):
        of_layer = {**values, **own, "layer_types": [kind] if kind else []}
        reach = _layers(of_layer)
        sinks = has_sinks and (reach["sliding_window"] is not None or not windowed_alone)
        every.append((heads_of(of_layer, tp), {**reach, "sinks": sinks}))
    shapes = [heads for n, (heads, _) in enumerate(every) if heads not in [h for h, _ in every[:n]]]
    first, *others = (
        (shape, [features for heads, features in every if heads == shape]) for shape in shapes
    )
    cap = values.get("attn_logit_softcapping")
    groups = [
        LayerGroup(
            layers=len(features),
            logit_cap=cap,
            **{name: shape[name] for name in shape if name != "kind"},
            **_joined(features),
        )
        for shape, features in others
    ]
    return {**first[0], **_joined(first[1]), "other_layers": tuple(groups)}


def _joined(features: list[dict[str, Any]]) -> dict[str, Any]:
    """What layers of one shape ask for together: windows and chunks have one size in a model."""
    return {
        name: next((each[name] for each in features if each[name]), unset)
        for name, unset in (("sliding_window", None), ("attention_chunk", None), ("sinks", False))
    }


def load_config(path: Path) -> dict[str, Any]:
    """Raises InvalidInput for a path without a usable config.json."""
    file, is_folder = path, False
    try:
        is_folder = path.is_dir()
        file = path / "config.json" if is_folder else path
        config = json.loads(read_file(str(file), MOST_BYTES))
    except FileNotFoundError:
        got = f"{path}, which has no config.json" if is_folder else f"{path}: no such file"
    except OSError as error:
        got = f"{str(file)[:LONGEST_NAME]}: {error.strerror or error}"
    except (ValueError, RecursionError) as error:
        got = f"{file}, which is not JSON ({error})"
    else:
        if isinstance(config, dict):
            return config
        got = f"{file}, which is not a JSON object"
    expected = "a folder with a Hugging Face config.json, or that file"
    raise InvalidInput("model", got=got, expected=expected)


def _check_sayable(values: Mapping[str, Any], latent: bool) -> None:
    """Refuse a model of whose attention a request could express only a part."""
    for what, expected in _unsayable(values, latent):
        raise InvalidInput("model", got=what, expected=expected)


def _unsayable(values: Mapping[str, Any], latent: bool) -> Iterator[tuple[str, str]]:
    """Yield each part that a request cannot express, and what it can."""
    types = frozenset(values["layer_types"])
    known = ATTENTION - (PICKED_BLOCKS if latent else INDEXED) | LINEAR | NO_MIXING
    if types and types.isdisjoint(ATTENTION) and types <= known:
        counts = linear_layers(values["layer_types"], values["model_type"])
        said = " and ".join(f"{count} {kind}" for kind, count in counts)
        yield f"{said or 'only moe and mlp'} layers and no attention", "softmax attention"
    bias = UNSAYABLE.get(values["model_type"], "")
    if bias:
        yield (
            f"{values['model_type']}, whose attention has {bias},",
            "what a Request has fields for",
        )
    if not types <= known:
        unknown = ", ".join(sorted(types - known))
        yield f"layer_types {unknown}", f"types of {', '.join(sorted(known))}"
    picking = [name for name in SPARSE if values.get(name)]
    if picking and not types and not latent:
        yield f"{picking[0]} without kv_lora_rank", "sparse attention only over MLA's latent"
    differing = differing_shapes(values)
    if differing and (latent or types & PICKED_BLOCKS or not attention_layers(values)):
        expected = "one shape of latent attention, or heads and dims whose layers config.json names"
        yield f"layers that differ in {', '.join(sorted(differing))}", expected


def _layers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Window and chunk, where at least one layer uses them."""
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
    """What the indexers of at least one layer pick. The later names are MiniMax-M3's own."""
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
    """None where the feature is off: absent, null or 0."""
    return whole(values, name) if values.get(name) else None


def _any_layer_windowed(values: Mapping[str, Any]) -> bool:
    if values.get("use_sliding_window") is False:
        return False
    first, layers = values.get("max_window_layers"), values.get("num_hidden_layers")
    return not (isinstance(first, int) and isinstance(layers, int)) or first < layers


def _dtype(config: Mapping[str, Any]) -> str | None:
    """Files older than transformers 5 call it `torch_dtype`."""
    name = config.get("dtype") or config.get("torch_dtype")
    return name if isinstance(name, str) else None


def _encoder(config: Mapping[str, Any], values: Mapping[str, Any], tp: int) -> dict[str, Any]:
    """Fields of a model that encodes whole sequences: it has no KV cache."""
    _check_sayable({**values, "layer_types": []}, latent=False)
    if _has_alibi(values):
        got = "an encoder with a bias by distance (ALiBi)"
        raise InvalidInput("model", got=got, expected="an encoder without a bias")
    heads = attention_heads(values, tp)
    vision = _encoder_head_dim(config.get("vision_config"))
    if vision not in (None, heads["head_dim"]):
        got = f"towers with head_dim {heads['head_dim']} and {vision}"
        raise InvalidInput("model", got=got, expected="one head_dim, or a request for each tower")
    return {
        "phases": ("encoder",),
        **{name: heads[name] for name in ("num_q_heads", "num_kv_heads", "head_dim")},
        "encoder_head_dim": heads["head_dim"],
        "relative_bias": values["model_type"] in RELATIVE,
        "dtype": _dtype(values) or _dtype(config),
    }


def _has_alibi(values: Mapping[str, Any]) -> bool:
    if values["model_type"] not in ALIBI:
        return bool(values.get("alibi"))
    attention = values.get("attn_config")
    return not (isinstance(attention, dict) and attention.get("alibi") is False)


def _encoder_head_dim(vision: object) -> int | None:
    """None where the vision_config leaves it to its class."""
    if not isinstance(vision, dict):
        return None
    if vision.get("head_dim"):
        return whole(vision, "head_dim", " in the vision_config")
    # Qwen2-VL's hidden_size is that of the language model.
    width = vision.get("embed_dim") or vision.get("hidden_size")
    names = ("num_attention_heads", "num_heads", "attention_heads")
    heads = next((vision[name] for name in names if vision.get(name)), None)
    if not isinstance(width, int) or not isinstance(heads, int):
        return None
    return width // heads


def _has_cross_attention(config: Mapping[str, Any], values: Mapping[str, Any]) -> bool:
    names = ("cross_attention_layers", "cross_layer_interval", "add_cross_attention")
    named = any(values.get(name) for name in ("is_encoder_decoder", *names))
    return named or bool(config.get("is_encoder_decoder"))
