"""The shape among those that were measured that is most like a question's."""

from __future__ import annotations

import re
from collections.abc import Iterable
from math import log2

from attnmux.core.facts.questions import Question
from attnmux.core.facts.request import Request
from attnmux.core.measured.shipped import Shape

STATED = frozenset(
    {
        *("vendor", "arch", "version", "features", "runtime", "phase", "graph"),
        *("kind", "dtype", "kv_dtype", "page_size", "spec_topk", "spec_draft_tokens"),
        *("num_q_heads", "num_kv_heads", "group_size", "head_dim", "v_head_dim"),
        *("kv_lora_rank", "qk_rope_head_dim", "sliding_window", "logit_cap", "sinks", "strided_kv"),
    }
)
"""Axes that figures tell something about. A question with a demand on another one, such as
`deterministic`, is like no shape: kernels run otherwise then."""

FEATURES = ("sliding_window", "logit_cap", "sinks")
APART = 2.0
"""The distance of shapes of which only one has a feature."""
WEIGHTS = {
    **{"rows": 2.0, "num_kv_heads": 0.5, "head_dim": 4.0, "v_head_dim": 4.0},
    **{"sliding_window": 0.1, "page_size": 0.2},
}
"""Distances of a factor of 2. Tiles have the width of a head. Their rows are the query heads that
share a KV head, and in verification those of all of a request's drafts."""
OPEN_PAGE = 0.3
"""The distance of a stated page size from each backend's own."""


BESIDE = 0.3
"""The distance of K and V side by side from a pool each."""


def nearest(shapes: Iterable[Shape], question: Question) -> Shape | None:
    """The most similar shape with figures of the question's phase; the first of equal ones.

    None if none is of its kind and its bits of KV, or if the question leaves its shape open.
    """
    asked = question.request
    stated = (asked.num_q_heads, asked.num_kv_heads, asked.head_dim, asked.dtype)
    if None in stated or not {axis.name for axis, _ in question.demands} <= STATED:
        return None
    kind = _kind(asked)
    found = [
        (_distance(shape, question), place, shape)
        for place, shape in enumerate(shapes)
        if _kind(shape.request) == kind and question.phase in shape.phases()
    ]
    return min(found, key=lambda each: each[:2])[2] if found else None


def _kind(asked: Request) -> tuple[object, ...]:
    """The facts that figures of one request must share with another's."""
    latent = (asked.kv_lora_rank, asked.qk_rope_head_dim) if asked.latent else ()
    return (asked.kind, _bits(asked.dtype), _bits(asked.kv_dtype or asked.dtype), *latent)


def _bits(dtype: str | None) -> int:
    """Bits of a value. Formats of as many bits are equally fast."""
    digits = re.search(r"\d+", dtype or "")
    return int(digits[0]) if digits else 0


def _distance(shape: Shape, question: Question) -> float:
    timed, asked = shape.request, question.request
    found = sum(APART for name in FEATURES if _has(timed, name) != _has(asked, name))
    rows = _group(timed), _group(asked)
    if question.phase == "verify":
        rows = rows[0] * shape.verified_drafts, rows[1] * (asked.spec_draft_tokens or 1)
    found += WEIGHTS["rows"] * _apart(*rows)
    for name in ("num_kv_heads", "head_dim"):
        found += WEIGHTS[name] * _apart(getattr(timed, name), getattr(asked, name))
    v_dims = timed.v_head_dim or timed.head_dim, asked.v_head_dim or asked.head_dim
    found += WEIGHTS["v_head_dim"] * _apart(*v_dims)
    if timed.strided_kv != asked.strided_kv:
        found += BESIDE
    if timed.sliding_window and asked.sliding_window:
        found += WEIGHTS["sliding_window"] * _apart(timed.sliding_window, asked.sliding_window)
    if asked.origins.get("page_size", "default") == "default":
        return found + (OPEN_PAGE if timed.page_size else 0)
    if timed.page_size is None:
        return found + OPEN_PAGE
    return found + WEIGHTS["page_size"] * _apart(timed.page_size, asked.page_size)


def _has(asked: Request, feature: str) -> bool:
    return getattr(asked, feature) not in (None, False, 0.0)


def _group(asked: Request) -> float:
    return (asked.num_q_heads or 1) / (asked.num_kv_heads or 1)


def _apart(one: float | None, other: float | None) -> float:
    return abs(log2((one or 1) / (other or 1)))
