"""A request's fields, read from a model's Hugging Face config.json."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from attnmux.configs.families import WINDOWS, family_of
from attnmux.configs.groups import layer_groups, reach
from attnmux.configs.heads import (
    attention_heads,
    attention_layers,
    differing_shapes,
    latent_heads,
    linear_dims,
    whole,
)
from attnmux.configs.kept import kept_layers, no_kept_layers
from attnmux.configs.kv_schemes import kv_scheme
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
from attnmux.configs.values import (
    check_known,
    families,
    is_tower,
    parts_of,
    stated,
    values_of,
)
from attnmux.core import InvalidInput, Request

SPARSE = ("index_topk", "index_topk_blocks", "indexer_budget", "sparse_attention_config")
"""Values of models in which an indexer picks keys."""


def read_model(
    config: Mapping[str, Any],
    tp: int,
    *,
    dtype: str | None = None,
    kv_dtype: str | None = None,
    kv_dtype_skip: str | None = None,
    assume: bool = False,
    weights: str | None = None,
) -> dict[str, Any]:
    """The fields of a Request that the model sets; dtype and so on as in `request_from_model`.

    weights: the dtype of the weights, for a config.json that states none.

    Raises UnknownModel for an unknown model type unless `assume` is set, and InvalidInput for
    attention that a request cannot express, for a `tp` that does not divide the heads, and for
    layers that cannot be skipped.
    """
    parts = parts_of(config)
    for part in parts:
        if unsayable := family_of(part).unsayable:
            got = f"{part['model_type']}, whose attention has {unsayable},"
            raise InvalidInput("model", got=got, expected="what a Request has fields for")
    if not assume:
        check_known(parts)
    values = values_of(parts)
    has_cross_attention = _has_cross_attention(config, values)
    is_encoder = not has_cross_attention and _is_encoder(parts, values)
    if kv_dtype_skip is not None and (is_encoder or has_cross_attention):
        raise no_kept_layers("an encoder" if is_encoder else "layers of cross attention")
    own_dtype, vision = stated_dtype(parts) or weights, stated(parts, "vision_config")
    if is_encoder:
        return {**_encoder(values, vision, tp), "dtype": own_dtype}
    latent = values.get("kv_lora_rank") is not None
    values["layer_types"] = types = layer_types(values)
    _check_sayable(values, latent)
    # Those layers ask for the LSE of their windows
    compressed = compressed_layers(types)
    kept, scheme = None, None
    if kv_dtype is None:
        scheme = kv_dtype = kv_scheme(stated(parts, "quantization_config"))
    if kv_dtype_skip is not None:
        dtype = dtype or (own_dtype and Request.canonical_dtype(own_dtype))
        kept = partial(kept_layers, kv_dtype_skip, dtype=dtype, kv_dtype=kv_dtype)
    return {
        "linear_layers": linear_layers(types, values["model_type"]),
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
        "kv_dtype": scheme,
        "alibi": bool(values.get("alibi")),
        "relative_bias": family_of(values).relative_bias,
        "logit_cap": values.get("attn_logit_softcapping"),
        "multimodal": isinstance(vision, dict),
        "encoder_head_dim": _encoder_head_dim(vision),
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
        counted = " and ".join(f"{count} {kind}" for kind, count in counts)
        yield f"{counted or 'only moe and mlp'} layers and no attention", "softmax attention"
    if values.get("sliding_window") == 1 and reach(values)["sliding_window"] is not None:
        yield "sliding_window=1, by which a token sees itself alone,", "2 or more, or none"
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


def stated_dtype(parts: list[Mapping[str, Any]]) -> str | None:
    """Files older than transformers 5 call it `torch_dtype`."""
    names = (part.get("dtype") or part.get("torch_dtype") for part in reversed(parts))
    return next((name for name in names if isinstance(name, str)), None)


def _is_encoder(parts: list[Mapping[str, Any]], values: Mapping[str, Any]) -> bool:
    """Whether tokens see later ones. A decoder may be trained further as an encoder."""
    sees_later = values.get("use_bidirectional_attention") in (True, "all")
    if sees_later or values.get("is_causal") is False:
        return True
    of_type = is_tower(parts) or any(family.encoder for family in families(parts))
    return of_type and not values.get("is_decoder")


def _encoder(values: Mapping[str, Any], vision: object, tp: int) -> dict[str, Any]:
    """Fields of a model that encodes whole sequences: it has no KV cache."""
    types = layer_types(values)
    _check_sayable({**values, "layer_types": []}, latent=False)
    hindrances = {
        "a bias by distance (ALiBi)": values.get("alibi"),
        WINDOWS: reach({**values, "layer_types": types})["sliding_window"],
        "layers without attention": not ATTENTION.issuperset(types),
    }
    for what, hinders in hindrances.items():
        if hinders:
            got, expected = f"an encoder with {what}", "one of plain attention over whole sequences"
            raise InvalidInput("model", got=got, expected=expected)
    heads = attention_heads(values, tp)
    tower = _encoder_head_dim(vision)
    if tower not in (None, heads["head_dim"]):
        got = f"towers with head_dim {heads['head_dim']} and {tower}"
        raise InvalidInput("model", got=got, expected="one head_dim, or a request for each tower")
    return {
        "phases": ("encoder",),
        **{name: heads[name] for name in ("num_q_heads", "num_kv_heads", "head_dim")},
        "encoder_head_dim": heads["head_dim"],
        "relative_bias": family_of(values).relative_bias,
    }


def _encoder_head_dim(vision: object) -> int | None:
    """None if the vision_config leaves it to its class."""
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
