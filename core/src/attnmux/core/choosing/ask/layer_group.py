"""Layers of a model that differ from its other layers in heads, dims or features."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from attnmux.core.choosing.common.checks import is_whole
from attnmux.core.choosing.common.plain import Plain
from attnmux.core.errors import InvalidInput


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerGroup(Plain):
    """A number of layers that are alike. The other fields are those of a `Request`."""

    layers: int
    """How many there are."""
    num_q_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    v_head_dim: int | None = None
    sliding_window: int | None = None
    attention_chunk: int | None = None
    sinks: bool = False
    logit_cap: float | None = None

    def __str__(self) -> str:
        return f"{self.layers} layer{'s' * (self.layers > 1)} with {shape_said(self)}"

    def needs(self) -> dict[str, Any]:
        """The fields of a request for these layers."""
        return {name: getattr(self, name) for name in NEEDS}


def shape_said(one: Any) -> str:  # noqa: ANN401  # a group or a request
    """Heads, dims and window of layers, in words."""
    dims = one.head_dim if one.v_head_dim is None else f"{one.head_dim}/{one.v_head_dim}"
    window = "" if one.sliding_window is None else f" and a window of {one.sliding_window}"
    return f"{one.num_q_heads}/{one.num_kv_heads} heads of {dims}{window}"


NEEDS = tuple(name for name in LayerGroup.__slots__ if name != "layers")


def read_groups(name: str, value: Any) -> tuple[LayerGroup, ...]:  # noqa: ANN401  # reads any value
    """Groups, or their `to_dict`. Raises InvalidInput for anything else, such as text."""
    try:
        items: Iterable[Any] = () if value in (None, "") else value
        groups = tuple(
            each if isinstance(each, LayerGroup) else LayerGroup(**_mapping(each)) for each in items
        )
    except TypeError:
        groups = (LayerGroup(layers=0),)
    if not all(is_whole(each.layers, 1) for each in groups):
        expected = "groups of layers, as `Request.from_model` reads them from a config.json"
        raise InvalidInput(name, got=repr(value), expected=expected)
    return groups


def _mapping(value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError("a group is a mapping")
    return value
