"""One phase of a request on a platform, and its demand on each axis."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from attnmux.core.facts.axes import AXES, DECIDED
from attnmux.core.facts.axis import Demand
from attnmux.core.facts.platform import Platform
from attnmux.core.facts.request import Request


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """One phase of a request on a platform. Unset values demand nothing."""

    request: Request
    platform: Platform
    phase: str
    demands: tuple[Demand, ...] = field(default=(), repr=False, compare=False)
    """The values that the question demands, each with its axis. Those given are of the same
    question before the solver set its open values; those that the solver adds come last."""

    def __post_init__(self) -> None:
        before = self.demands
        demands = list(before)
        for axis in DECIDED if before else AXES:
            value = axis.wanted(self)
            if value is not None and value is not False and (axis, value) not in before:
                demands.append((axis, value))
        object.__setattr__(self, "demands", tuple(demands))


Questions = Mapping[str, Question]
"""The questions of a request, by phase."""


def demands_of(questions: Iterable[Question]) -> dict[Demand, list[str]]:
    """The phases that make each demand, in the order of the axes."""
    phases_by_demand: dict[Demand, list[str]] = {}
    for question in questions:
        for demand in question.demands:
            phases_by_demand.setdefault(demand, []).append(question.phase)
    return {
        demand: phases_by_demand[demand]
        for demand in sorted(phases_by_demand, key=lambda one: AXES.index(one[0]))
    }
