"""Small random configs of transformers' decoders, by rules over the names of their fields.

The rules are in `rules.py`. `OVERRIDES` holds the values of the few architectures that need others.
"""

# mypy: allow-untyped-calls
# transformers is annotated in part only.

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from transformers import PreTrainedConfig

from tools.models.overrides import OVERRIDES, REAL_OVERRIDES
from tools.models.recipe import Recipe
from tools.models.rules import OFTEN_NONE, ROPE_THETA, RULES, TOWER, Dims

VARIANTS = (
    {"tied": False, "grouped": True},
    {"tied": True, "grouped": True},
    {"tied": True, "grouped": False},
)
"""How dims are drawn, from the freest on: the first that an architecture accepts is taken."""


PARTS = ("is_decoder", "add_cross_attention")
"""Fields by which a config of two models tells what each of them is."""


def random_config(
    config_class: type[PreTrainedConfig], recipe: Recipe, variant: Mapping[str, bool]
) -> PreTrainedConfig:
    """A small config of a class. variant: one of VARIANTS.

    Raises whatever the class raises for dims that it does not accept.
    """
    rng = random.Random(f"{config_class.__name__} {recipe.seed}")
    dims = Dims.drawn(rng, **variant, kind=recipe.dims)
    given = _values(config_class, dims)
    return _made(config_class, given, REAL_OVERRIDES if recipe.dims == "real" else {})


def _made(
    config_class: type[PreTrainedConfig],
    given: Mapping[str, object],
    later: Mapping[str, object] = MappingProxyType({}),
) -> PreTrainedConfig:
    """later: of the fields given here, those that have other values than in OVERRIDES."""
    fields: dict[str, Any] = {**given, **OVERRIDES.get(config_class.__name__, {})}
    fields |= {name: value for name, value in later.items() if name in fields}
    return config_class(**fields)


def _values(config_class: type[PreTrainedConfig], dims: Dims) -> dict[str, object]:
    default = default_config(config_class)
    stated = {**vars(default)}
    dims = replace(dims, has_encoder=dims.has_encoder or default.is_encoder_decoder)
    layers = _num_layers(stated, config_class.attribute_map)
    kinds = [len(set(value)) for value in stated.values() if _one_each(value, layers)]
    dims = replace(dims, layers=max([dims.layers, *kinds]))
    given: dict[str, object] = {}
    for name, value in stated.items():
        if isinstance(value, PreTrainedConfig):
            given[name] = _nested(name, value, dims)
        elif name == "is_decoder" and dims.has_encoder:
            continue  # the config itself tells its parts
        elif name in RULES and (value is not None or name in OFTEN_NONE):
            given[name] = RULES[name](dims)
        elif name == "rope_parameters" and _lacks_theta(value):
            given[name] = {**value, "rope_theta": ROPE_THETA}
        elif name.endswith("token_id") and isinstance(value, int) and value >= dims.vocab:
            given[name] = dims.vocab - 1
        elif _one_each(value, layers):
            given[name] = list(_spread(value, dims.layers))
    _set_derived(given, stated)
    return given


def _lacks_theta(value: object) -> bool:
    return isinstance(value, dict) and value.get("rope_theta", 0) is None


def default_config(config_class: type[PreTrainedConfig]) -> PreTrainedConfig:
    """The config of a class without arguments, or with the fewest that it takes."""
    try:
        return config_class()
    except Exception:  # validators raise errors of their own
        return _made(config_class, {})


def _nested(name: str, value: PreTrainedConfig, dims: Dims) -> PreTrainedConfig:
    own = type(value)
    if name in ("vision_config", "audio_config", "vq_config", "audio_encoder_config"):
        given = {key: TOWER[key] for key in vars(value) if key in TOWER}
    else:
        given = _values(own, dims)
    given |= {part: vars(value)[part] for part in PARTS if vars(value).get(part)}
    return _made(own, given)


def _num_layers(stated: Mapping[str, object], renamed: Mapping[str, str]) -> int:
    value = stated.get(renamed.get("num_hidden_layers", "num_hidden_layers"), 0)
    return value if isinstance(value, int) else 0


def _one_each(value: object, layers: int) -> bool:
    """Whether a field names a kind for each layer."""
    is_list = isinstance(value, list | tuple) and len(value) == layers > 1
    return is_list and all(isinstance(each, str) for each in value)  # type: ignore[attr-defined]  # a list


def _spread(value: list[str], layers: int) -> Iterator[str]:
    """All kinds of the list, in as many layers."""
    kinds = list(dict.fromkeys(value))
    return (kinds[index % len(kinds)] for index in range(layers))


def _set_derived(given: dict[str, Any], stated: Mapping[str, object]) -> None:
    """Dims of latent attention that a config may also compute from others."""
    rope_dim = given.get("qk_rope_head_dim")
    if rope_dim is None:
        return
    dims = {stated["qk_rope_head_dim"]: rope_dim}
    if "qk_nope_head_dim" in given:
        dims[stated.get("qk_head_dim", -1)] = rope_dim + given["qk_nope_head_dim"]
    for name in ("head_dim", "qk_head_dim"):
        given.pop(name, None)
        if stated.get(name) is not None and stated[name] in dims:
            given[name] = dims[stated[name]]
    if stated.get("num_key_value_heads") == stated.get("num_attention_heads"):
        given["num_key_value_heads"] = given["num_attention_heads"]
