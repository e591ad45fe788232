"""Layers in groups that are alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from attnmux.core import InvalidInput, LayerSpec

STORED = ("kind", "tp_k_head_num", "qk_head_dim", "v_head_dim", "kv_dtype")
"""Fields that a pool's layers have in common."""

SHAPE = (*STORED, "tp_q_head_num")
"""Fields that the layers of one backend have in common."""


def by_shape(layers: Sequence[LayerSpec], *names: str) -> list[list[LayerSpec]]:
    """The layers in groups that have the same values of these fields, in the order of their first
    layers.

    Raises InvalidInput without layers, and for latent layers that are not all alike: a model has
    one kind of them.
    """
    if not layers:
        raise InvalidInput("layers", got="none", expected="at least one layer")
    groups: dict[tuple[object, ...], list[LayerSpec]] = {}
    for layer in layers:
        groups.setdefault(tuple(getattr(layer, name) for name in names), []).append(layer)
    found = list(groups.values())
    if len(found) > 1 and any(layer.kind != "mha" for layer in layers):
        _refuse(found[0][0], found[1][0], names)
    return found


def _refuse(first: LayerSpec, other: LayerSpec, names: Sequence[str]) -> NoReturn:
    name = next(name for name in names if getattr(other, name) != getattr(first, name))
    raise InvalidInput(
        f"layer {other.layer_id}",
        got=f"{name} {getattr(other, name)}",
        expected=f"{getattr(first, name)}, as in layer {first.layer_id}: only layers of kind mha "
        "may differ",
    )
