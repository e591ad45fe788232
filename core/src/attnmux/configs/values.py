"""The values of a model's decoder: those in its config.json, and its class's defaults."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attnmux.configs.families import FAMILIES, Family, family_of
from attnmux.core import NoBackend

PARTS = (
    *("text_config", "llm_config", "language_config", "thinker_config"),
    *("decoder_config", "decoder"),
)
"""Objects of a config.json that hold the decoder's values, or lead to them."""

DECODERS, OTHERS = (
    frozenset(names.split())
    for names in Path(__file__).with_name("transformers_types.txt").read_text("utf-8").split("\n\n")
)
"""The model types of transformers 5.24: those that generate text, with the text models in them;
and encoders, towers and models of other things than text. A test compares them."""


def parts_of(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The config.json and the objects in it that lead to the decoder, which is the last."""
    parts = [config]
    while True:
        inner = [parts[-1][name] for name in PARTS if isinstance(parts[-1].get(name), dict)]
        if not inner:
            return parts
        parts.append(inner[0])


def stated(parts: list[Mapping[str, Any]], name: str) -> Any:  # noqa: ANN401  # of JSON
    """The value of the innermost part that has one."""
    return next((part[name] for part in reversed(parts) if part.get(name) is not None), None)


def families(parts: list[Mapping[str, Any]]) -> list[Family]:
    return [family_of(part) for part in parts]


def values_of(parts: list[Mapping[str, Any]]) -> dict[str, Any]:
    """The decoder's values by their usual names, with those of its family."""
    model_type = str(stated(parts, "model_type") or "")
    family = family_of({"model_type": model_type})
    values = {**family.defaults, **parts[-1], "model_type": model_type}
    for name, renamed in family.names.items():
        if values.get(name) is None:
            values[name] = _at(values, renamed)
    for name, value, implied in family.when:
        if _at(values, name) == value:
            values |= implied
    kv_heads = values.get("num_key_value_heads")
    if family.windowed_kv_heads > 1 and isinstance(kv_heads, int):
        values.setdefault("swa_num_key_value_heads", kv_heads * family.windowed_kv_heads)
    return values


class UnknownModel(NoBackend):
    """A model type of whose attention nothing is known, so that no backend is chosen for it."""

    def __init__(self, what: str, *, assumption: str) -> None:
        self.assumed = f"{what}: read as {assumption}"
        super().__init__(f"{self.assumed} only with --assume (in Python: assume=True)")


def check_known(parts: list[Mapping[str, Any]]) -> None:
    """Raise UnknownModel for a model type whose attention is unknown."""
    types = [str(part["model_type"]) for part in parts if part.get("model_type")]
    if types and (types[-1] in FAMILIES or types[-1] in DECODERS):
        return
    if types and types[-1] in OTHERS:
        what = f"model type {types[-1]}, which is no decoder"
        raise UnknownModel(what, assumption="plain attention over whole sequences")
    what = f"unknown model type {types[-1]}" if types else "no model_type"
    raise UnknownModel(what, assumption="causal MHA")


def is_tower(parts: list[Mapping[str, Any]]) -> bool:
    """Whether transformers has the model type, and does not generate text with it."""
    return stated(parts, "model_type") in OTHERS


def _at(values: Mapping[str, Any], path: str) -> Any:  # noqa: ANN401  # of JSON
    """The value at names with dots between them; None without it."""
    first, _, rest = path.partition(".")
    value = values.get(first)
    if not rest:
        return value
    return _at(value, rest) if isinstance(value, dict) else None
