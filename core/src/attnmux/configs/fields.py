"""A request's fields, read from a model's Hugging Face config.json."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from attnmux.configs.groups import layer_groups
from attnmux.configs.heads import (
    attention_heads,
    attention_layers,
    differing_shapes,
    latent_heads,
    linear_dims,
    whole,
)
from attnmux.configs.kept import kept_layers, no_kept_layers
from attnmux.configs.layers import (
    ATTENTION,
    INDEXED,
    LINEAR,
    NO_MIXING,
    PICKED_BLOCKS,
    compressed_layers,
    layer_types,
    linear_layers,
)
from attnmux.configs.model_types import (
    ALIBI,
    DEFAULTS,
    ENCODERS,
    NAMES,
    RELATIVE,
    UNSAYABLE,
    WINDOW_KV_HEADS,
)
from attnmux.core import InvalidInput, canonical_dtype

SPARSE = ("index_topk", "index_topk_blocks", "indexer_budget", "sparse_attention_config")
"""Values of models in which an indexer picks keys."""


def read_model(
    config: Mapping[str, Any],
    tp: int,
    *,
    dtype: str | None = None,
    kv_dtype: str | None = None,
    kv_dtype_skip: str | None = None,
) -> dict[str, Any]:
    """The fields of a Request that the model sets; dtype and so on as in `request_from_model`.

    Raises InvalidInput for attention that a request cannot express, for a `tp` that does not
    divide the heads, and for layers that cannot be skipped.
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
    has_cross_attention = _has_cross_attention(config, values)
    is_encoder = not {model_type, whole_type}.isdisjoint(ENCODERS) and not values.get("is_decoder")
    if kv_dtype_skip is not None and (is_encoder or has_cross_attention):
        raise no_kept_layers("an encoder" if is_encoder else "layers of cross attention")
    if is_encoder:
        return _encoder(config, values, tp)
    latent = values.get("kv_lora_rank") is not None
    values["layer_types"] = types = layer_types(values)
    _check_sayable(values, latent)
    # Those layers ask for the LSE of their windows
    compressed = compressed_layers(types)
    own_dtype, kept = _dtype(text) or _dtype(config), None
    if kv_dtype_skip is not None:
        dtype = dtype or (own_dtype and canonical_dtype(own_dtype))
        kept = partial(kept_layers, kv_dtype_skip, dtype=dtype, kv_dtype=kv_dtype)
    return {
        "linear_layers": linear_layers(types, model_type),
        **linear_dims(values, types),
        **({"compressed_layers": compressed, "lse": True} if compressed else {}),
        **layer_groups(
            values,
            latent_heads if latent else attention_heads,
            tp,
            dtype=dtype,
            kept=kept,
        ),
        "dtype": own_dtype,
        "alibi": _has_alibi(values),
        "relative_bias": model_type in RELATIVE,
        "logit_cap": values.get("attn_logit_softcapping"),
        "multimodal": isinstance(config.get("vision_config"), dict),
        "encoder_head_dim": _encoder_head_dim(config.get("vision_config")),
        "cross_attention": has_cross_attention,
    }


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
