"""What models compute before and after a product, as they write it.

It is traced as the compiler traces a model, so that a graph has the same operations.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import torch
from torch._inductor.pattern_matcher import Match, PatternExpr, fwd_only, fx_to_pattern

Tensor = torch.Tensor


def normed(x: Tensor, eps: Tensor) -> Tensor:
    wide = x.float()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)


def norm(x: Tensor, weight: Tensor, eps: Tensor) -> Tensor:
    return weight * normed(x, eps).to(x.dtype)


def norm_from_one(x: Tensor, weight: Tensor, eps: Tensor) -> Tensor:
    return (normed(x, eps) * (1.0 + weight.float())).to(x.dtype)


NORMS = ((norm, 0.0), (norm_from_one, 1.0))
"""Norms, and what each adds to its weight."""
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": partial(torch.nn.functional.gelu, approximate="tanh"),
}


def gated(name: str, gate: Tensor, up: Tensor) -> Tensor:
    return ACTIVATIONS[name](gate) * up


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + turned * sin


@cache
def _pattern(
    function: Callable[..., Tensor], names: tuple[str, ...], width: int, dtype: torch.dtype
) -> PatternExpr:
    """The operations of a function of rows [1, 1, 1, width] and an eps."""
    rows = {name: torch.ones(1, 1, 1, width, dtype=dtype) for name in names}
    given = {**rows, "eps": torch.ones(())} if "eps" in names else rows
    with torch.no_grad():
        return fx_to_pattern(fwd_only(function, [*given.values()]), argnames=names)


GATES = {name: partial(gated, name) for name in ACTIVATIONS}


def match(
    function: Callable[..., Tensor],
    names: tuple[str, ...],
    node: torch.fx.Node,
    width: int,
    dtype: torch.dtype,
) -> Match | None:
    """The operands of a function by name, if a node is its result for rows of this width."""
    found = _pattern(function, names, width, dtype).match(node)
    return found if isinstance(found, Match) else None
