"""Random cases of linear layers from what a card claims. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

from attnmux.core import ForwardMode, Request
from attnmux.testing.cases.case import Step, decode, extend, verify
from attnmux.testing.cases.linear import SHAPES, LinearCase
from attnmux.testing.run.candidate import Candidate

DIMS = (1, 8, 16, 24, 32, 64, 80, 96, 100, 128, 192, 256)
MOST_PRODUCTS = 1 << 24
"""Most products of a step and layer: tokens times heads times dims. The reference takes about a
second."""
DRAFT_COST = 4
"""Cost of a verified token, in tokens: the states after each are compared."""
DRAFTS = 200
"""Refused drafts in a row after which a card is taken to admit none."""


def linear_samples(
    candidate: Candidate, seed: int, *, most_cost: float = 1.0
) -> Iterator[LinearCase]:
    """Yield random admitted cases without end; none for a card without linear layers.

    most_cost: scales `MOST_PRODUCTS`.
    """
    clauses = candidate.card.clauses
    kinds = [
        kind for kind in Request.LINEAR_KINDS if any(each.kind.admits(kind) for each in clauses)
    ]
    dims = {kind: _dims(candidate, kind) for kind in kinds}
    rng, refused, number = Random(seed), 0, 0
    while kinds and refused < DRAFTS:
        kind = rng.choice(kinds)
        case = _draft(rng, kind, number, most_cost, dims[kind])
        if not candidate.admits(case):
            refused += 1
            continue
        refused, number = 0, number + 1
        yield case


def _dims(candidate: Candidate, kind: str) -> tuple[int, ...]:
    """The `DIMS` that the card admits in K and V of some head of the kind; all if it names none of
    them."""
    served = [
        (clause.head_dim, clause.v_head_dim)
        for clause in candidate.card.clauses
        if clause.kind.admits(kind)
    ]
    found = (dim for dim in DIMS[1:] if any(each.admits(dim) for pair in served for each in pair))
    return tuple(found) or DIMS[1:]


def _draft(
    rng: Random, kind: str, number: int, most_cost: float, dims_of_head: tuple[int, ...]
) -> LinearCase:
    shape: dict[str, Any] = dict(SHAPES[kind])
    group = 1 if kind in ("kda", "lightning") else rng.choice((1, 1, 2, 3, 4, 8))
    if kind == "mamba1":
        shape |= {"num_v_heads": rng.randint(1, 80), "head_k_dim": rng.choice((4, 16, 64))}
    elif kind != "conv":
        heads = rng.choice((1, 2, 3, 4, 8))
        shape |= {"num_k_heads": heads, "num_v_heads": heads * group}
        shape |= {"head_k_dim": rng.choice(dims_of_head), "head_v_dim": rng.choice(dims_of_head)}
    if shape.get("conv_size") != 0:
        convs = rng.choice((1, 1, 2, 3))
        shape["conv_dims"] = tuple(rng.randint(1, 200) for _ in range(convs))
        shape["conv_size"] = rng.choice((2, 3, 4, 4, 4, 5))
        shape["conv_bias"] = rng.random() < 0.5
    dims = shape.get("head_k_dim", 64) * shape.get("head_v_dim", 64) * shape.get("num_v_heads", 1)
    tokens = max(1, int(MOST_PRODUCTS * most_cost) // max(dims, 256))
    graph, verifies = rng.random() < 0.3, rng.random() < 0.3
    return LinearCase(
        name=f"sampled-{number}-{kind}",
        kind=kind,  # type: ignore[arg-type]  # one of Request.LINEAR_KINDS
        steps=tuple(
            _step(rng, tokens, graph=graph, verifies=verifies) for _ in range(rng.randint(1, 3))
        ),
        qk_l2norm=kind in ("gdn", "kda") and rng.random() < 0.7,
        strong_decay=rng.random() < 0.3,
        dtype=rng.choice(Request.DTYPES[:3]),
        host_lens=rng.random() < 0.5,
        graph=graph,
        **{name: value for name, value in shape.items() if name != "qk_l2norm"},
    )


def _step(rng: Random, tokens: int, *, graph: bool, verifies: bool) -> Step:
    rows = rng.choice((1, 2, 5, rng.randint(1, 40)))
    if verifies and rng.random() < 0.6:
        drafts = rng.choice((1, 2, 4, rng.randint(1, 9)))
        rows = max(1, min(rows, tokens // (DRAFT_COST * drafts)))
        prefixes = [rng.choice((0, 1, 2, rng.randint(1, 5000))) for _ in range(rows)]
        return verify(min(drafts, tokens), *prefixes, padding=rng.choice((0, 0, 3)))
    if graph or rng.random() < 0.4:
        lens = [rng.choice((1, 2, rng.randint(1, 5000))) for _ in range(min(rows, tokens))]
        return decode(*lens, padding=rng.choice((0, 0, 3)))
    asked, left = [], tokens
    for _ in range(rows):
        new = min(rng.choice((0, 1, 16, 63, 64, 65, rng.randint(1, 700))), left)
        asked.append((rng.choice((0, 0, 1, rng.randint(1, 5000))), new))
        left -= new
    mode = rng.choice((ForwardMode.EXTEND, ForwardMode.MIXED))
    return extend(*asked, mode=mode, padding=rng.choice((0, 2)), trailing=rng.choice((0, 3)))
