"""The common part of all kinds of indexers: their trial, and their result."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from inspect import unwrap
from typing import Any

TRIED_TOKENS = 24
TOLERANCE = 0.02
"""By how much scores may differ, as a share of the largest score: above rounding in any dtype, and
far below the effect of another rotary function or scale."""
PICKED = False
"""The result of most indexers: their picks are on the batch. It is not None, which layers that
share the picks of an earlier one read as missing. Nor is it a value for attention, which an unknown
indexer would pass on."""
ROTARY = "apply_rotary_pos_emb"
"""How the names of transformers' rotary functions begin."""


def forward_of(module: object) -> Any:  # noqa: ANN401  # a function, which transformers may wrap
    """The function of a module's class that its calls run."""
    return unwrap(type(module).forward)  # type: ignore[attr-defined]  # a torch module has it


def is_built_of(module: Any, parts: Set[str], numbers: Iterable[str]) -> bool:  # noqa: ANN401  # a torch module
    """Whether a module has all of these submodules, and a whole number of each of these names."""
    children = {name for name, _ in module.named_children()}
    return children >= parts and all(
        isinstance(getattr(module, number, None), int) for number in numbers
    )


def rotary_of(module: object) -> Callable[..., Any] | None:
    """The rotary function that a module's forward calls; None unless it calls one."""
    forward = forward_of(module)
    names = [name for name in forward.__code__.co_names if name.startswith(ROTARY)]
    if len(names) != 1:
        return None
    rotary: Callable[..., Any] | None = forward.__globals__.get(names[0])
    return rotary
