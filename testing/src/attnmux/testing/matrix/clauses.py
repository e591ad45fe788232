"""How clauses of one card differ, in words."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from attnmux.core.plugin import ANY, NONE, Clause, Condition, one_of
from attnmux.core.verbs import AXES

_DECIDING = (
    *(axis.name for axis in AXES if axis.of_platform and axis.name != "kind"),
    "dtype",
)
_FOLLOWING = tuple(axis.name for axis in AXES if axis.name not in (*_DECIDING, "kind"))
"""A difference on a deciding axis explains others; each difference on a following axis is named."""


def restrictions(feature: str, having: Sequence[Clause], asked: Sequence[Clause]) -> list[str]:
    """The axes on which the clauses with the feature admit less than all clauses asked for it.

    Consequences of an earlier difference are left out: an SM range where the vendor differs, a KV
    dtype that goes with the dtype.
    """
    said = []
    others = list(asked)
    for name in (*_DECIDING, *_FOLLOWING):
        own = union(name, having)
        if name == feature or own == union(name, others):
            continue
        words = name.replace("_", " ")
        said.append(f"{words} {union_said(own)}" if own else f"without {words}")
        if name not in _FOLLOWING:
            others = [clause for clause in others if union(name, [clause]) & own]
    return said


def either(feature: str, having: Sequence[Clause], lacking: Sequence[Clause]) -> str:
    """How each clause with the feature differs, where no single axis separates them."""
    apart = [", ".join(restrictions(feature, [each], [each, *lacking])) for each in having]
    known = apart and all(apart)
    return " or ".join(dict.fromkeys(apart)) if known else "not in every combination"


def covers(wide: Clause, narrow: Clause, feature: str) -> bool:
    """Whether `wide` admits all that `narrow` does, apart from the feature's own axis."""
    return all(
        name == feature or union(name, [wide]) == union(name, [wide, narrow])
        for name in (*_DECIDING, *_FOLLOWING)
    )


def union(name: str, clauses: Iterable[Clause]) -> frozenset[Condition]:
    """The union of the clauses' conditions on an axis, with listed values one by one."""
    found: set[Condition] = set()
    for clause in clauses:
        condition: Condition = getattr(clause, name)
        if condition.listed:
            found.update(map(one_of, condition.listed))
        elif condition is not NONE:
            found.add(condition)
    if ANY in found:
        return frozenset({ANY})
    wide = [condition for condition in found if not condition.listed]
    return frozenset(
        condition
        for condition in found
        if not condition.listed or not any(other.admits(condition.listed[0]) for other in wide)
    )


def union_said(conditions: frozenset[Condition]) -> str:
    """ "16, 32 or 64": listed values in order, then other conditions."""
    listed = [value for each in conditions for value in each.listed]
    numbers = all(isinstance(value, (int, float)) for value in listed)
    ordered = sorted(listed, key=lambda value: value if numbers else str(value))
    others = sorted(
        (str(each) for each in conditions if not each.listed),
        key=lambda said: ([int(number) for number in re.findall(r"\d+", said)], said),
    )
    parts = [str(one_of(*ordered))] if ordered else []
    return " or ".join([*parts, *others]) or "none"
