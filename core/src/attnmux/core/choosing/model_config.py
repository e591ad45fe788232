"""What a Hugging Face config.json says about a model's attention."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attnmux.core.errors import InvalidInput

GEMMA = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}
QWEN = {"num_attention_heads": 32, "num_key_value_heads": 32, "use_sliding_window": False}
DEEPSEEK = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}

DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {"num_attention_heads": 32, "hidden_size": 4096},
    "llama4_text": {
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "attention_chunk_size": 8192,
    },
    "qwen2": {**QWEN, "hidden_size": 4096, "sliding_window": 4096, "max_window_layers": 28},
    "qwen3": {**QWEN, "head_dim": 128, "sliding_window": 4096, "max_window_layers": 28},
    "mistral": {
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "hidden_size": 4096,
        "sliding_window": 4096,
    },
    "gemma2": {**GEMMA, "sliding_window": 4096, "attn_logit_softcapping": 50.0},
    "gemma3_text": {**GEMMA, "sliding_window": 4096},
    "gpt_oss": {
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "sliding_window": 128,
    },
    "deepseek_v2": {**DEEPSEEK, "num_attention_heads": 32},
    "deepseek_v3": {**DEEPSEEK, "num_attention_heads": 128},
}
"""What each model type means where its config.json is silent: a config.json may hold only what
differs from the class's defaults (Gemma 3 does so). Source: the config classes of transformers
5.23; a test compares them."""

SINKS = frozenset({"gpt_oss"})
"""Model types whose attention has sinks: weights, which a config.json does not mention."""


def read_model(path: Path, tp: int) -> dict[str, Any]:
    """The fields of a Request that the model sets.

    Raises InvalidInput for a path without a usable config.json, or a `tp` that does not divide.
    """
    config = _load(path)
    inner = config.get("text_config")
    text = inner if isinstance(inner, dict) else config
    model_type = str(text.get("model_type", config.get("model_type", "")))
    values = {**DEFAULTS.get(model_type, {}), **text}
    source = str(path)
    latent = values.get("kv_lora_rank") is not None
    return {
        **(_latent_heads if latent else _heads)(values, source, tp),
        **_layers(values, source),
        "dtype": _dtype(text) or _dtype(config),
        "sinks": model_type in SINKS,
        "logit_cap": values.get("attn_logit_softcapping"),
        "multimodal": isinstance(config.get("vision_config"), dict),
        "cross_attention": _has_cross_attention(config, text),
    }


def _load(path: Path) -> dict[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    expected = "a folder with a Hugging Face config.json, or that file"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        came = f"{path}, which has no config.json" if path.is_dir() else f"{path}: no such file"
        raise InvalidInput("model", came=came, expected=expected) from None
    except OSError as error:
        raise InvalidInput("model", came=f"{file}: {error.strerror}", expected=expected) from None
    except (ValueError, RecursionError) as error:
        came = f"{file}, which is not JSON ({error})"
        raise InvalidInput("model", came=came, expected=expected) from None
    if not isinstance(config, dict):
        raise InvalidInput("model", came=f"{file}, which holds no object", expected=expected)
    return config


def _whole(values: Mapping[str, Any], name: str, source: str) -> int:
    number = values.get(name)
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        came = f"{name}={number!r} in {source}"
        raise InvalidInput("model", came=came, expected=f"a positive {name} in config.json")
    return number


def _q_heads_per_rank(values: Mapping[str, Any], source: str, tp: int) -> int:
    heads = _whole(values, "num_attention_heads", source)
    if tp < 1 or heads % tp:
        raise InvalidInput("tp", came=str(tp), expected=f"a divisor of the model's {heads} heads")
    return heads // tp


def _heads(values: Mapping[str, Any], source: str, tp: int) -> dict[str, Any]:
    q_heads = _q_heads_per_rank(values, source, tp)
    name = (
        "num_attention_heads"
        if values.get("num_key_value_heads") is None
        else "num_key_value_heads"
    )
    kv_heads = _whole(values, name, source)
    if kv_heads % tp and tp % kv_heads:
        expected = f"a divisor or a multiple of the model's {kv_heads} KV heads"
        raise InvalidInput("tp", came=str(tp), expected=expected)
    heads = q_heads * tp
    if heads % kv_heads:
        came = f"{heads} heads over {kv_heads} KV heads in {source}"
        raise InvalidInput("model", came=came, expected="as many heads for each KV head")
    name = "hidden_size" if values.get("head_dim") is None else "head_dim"
    dims = _whole(values, name, source)
    head_dim = dims // heads if name == "hidden_size" else dims
    if not head_dim:
        came = f"{name}={dims} for {heads} heads in {source}"
        raise InvalidInput("model", came=came, expected="at least one dimension a head")
    return {
        "kind": "mha",
        "num_q_heads": q_heads,
        "num_kv_heads": max(1, kv_heads // tp),
        "head_dim": head_dim,
    }


def _latent_heads(values: Mapping[str, Any], source: str, tp: int) -> dict[str, Any]:
    rope = _whole(values, "qk_rope_head_dim", source)
    return {
        "kind": "nsa" if values.get("index_topk") is not None else "mla",
        "num_q_heads": _q_heads_per_rank(values, source, tp),
        "num_kv_heads": 1,
        "head_dim": _whole(values, "qk_nope_head_dim", source) + rope,
        "v_head_dim": _whole(values, "v_head_dim", source),
        "kv_lora_rank": _whole(values, "kv_lora_rank", source),
        "qk_rope_head_dim": rope,
    }


def _layers(values: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Window and chunk, asked for where at least one layer uses them."""
    types = values.get("layer_types") or []
    if not isinstance(types, list):
        came = f"layer_types={types!r} in {source}"
        raise InvalidInput("model", came=came, expected="a list of layer_types, or none")
    windowed = "sliding_attention" in types if types else _any_layer_windowed(values)
    chunked = "chunked_attention" in types if types else True
    window = _size(values, "sliding_window", source) if windowed else None
    return {
        # transformers counts the query among the n keys that a window shows
        "sliding_window": None if window is None else window - 1,
        "attention_chunk": _size(values, "attention_chunk_size", source) if chunked else None,
    }


def _size(values: Mapping[str, Any], name: str, source: str) -> int | None:
    """None where the feature is off: absent, null or 0."""
    return _whole(values, name, source) if values.get(name) else None


def _any_layer_windowed(values: Mapping[str, Any]) -> bool:
    if values.get("use_sliding_window") is False:
        return False
    first, layers = values.get("max_window_layers"), values.get("num_hidden_layers")
    return not (isinstance(first, int) and isinstance(layers, int)) or first < layers


def _dtype(config: Mapping[str, Any]) -> str | None:
    """`torch_dtype` is the name that files older than transformers 5 use."""
    name = config.get("dtype") or config.get("torch_dtype")
    return name if isinstance(name, str) else None


def _has_cross_attention(config: Mapping[str, Any], text: Mapping[str, Any]) -> bool:
    return bool(config.get("is_encoder_decoder") or text.get("cross_attention_layers"))
