"""Requests and machines that a card must refuse: those just outside its limits, and those that no
case of the suite can ask for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from attnmux.core import Platform, Request
from attnmux.core.verbs import AXES, Axis, Question
from attnmux.testing.cases.linear import AnyCase, linear_cases, linear_in_graphs
from attnmux.testing.cases.standard import in_graphs, standard_cases
from attnmux.testing.run.candidate import Candidate, Outcome
from attnmux.testing.sampling.points import Value

ELSEWHERE: Mapping[str, Any] = {
    "vendor": "nobody",
    "arch": "unknown",
    "version": (),
    "features": frozenset(),
    "runtime": "",
}
"""Values of `Platform`'s fields that meet no requirement of a card."""

LARGE = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class OutsidePoint:
    """A request, or a platform, that no clause of a card may serve on one axis."""

    axis: str
    value: str
    request: Request
    platform: Platform
    unproven: bool = False
    """A clause serves the value, and no case of the suite can ask for it."""

    @property
    def name(self) -> str:
        return f"{self.axis}={self.value}"


def outside_points(candidate: Candidate) -> tuple[OutsidePoint, ...]:
    """One step beyond each limit of the card, from a plain request that it admits in each phase.

    Words and features that the card serves and no case can ask for are among them.
    """
    found: dict[str, OutsidePoint] = {}
    provable = _provable()
    for request in _plain_requests(candidate):
        for axis in AXES:
            for point in _outside(candidate, axis, request, provable):
                found.setdefault(point.name, point)
    return tuple(found.values())


def try_point(candidate: Candidate, point: OutsidePoint) -> Outcome:
    """Check that the selector refuses the point because of its axis.

    The outcome is "refused" if so, and "failed" if it admits the point or refuses it for other
    reasons. An unproven point has failed.
    """
    if point.unproven:
        message = (
            f"the card of {candidate.card.name} serves {point.name}, and no case of the suite can "
            f"ask for it: list only proven values in the clause's {point.axis}"
        )
        return Outcome(case=point.name, status="failed", message=message)
    reasons = candidate.refusals(point.request, point.platform)
    if any(reason.axis == point.axis for reason in reasons):
        return Outcome(case=point.name, status="refused", reasons=reasons)
    said = "; ".join(map(str, reasons)) or "admitted"
    message = (
        f"no clause of {candidate.card.name} serves {point.name}, but the selector said: {said}"
    )
    return Outcome(case=point.name, status="failed", message=message, reasons=reasons)


def _plain_requests(candidate: Candidate) -> Iterator[Request]:
    """The first request of each kind and phase that the card admits."""
    seen: set[tuple[str, tuple[str, ...]]] = set()
    unseen = (
        case
        for case in candidate.cases()
        if len(case.phases) == 1 and (case.kind, case.phases) not in seen
    )
    for case in candidate.admitted(unseen):
        seen.add((case.kind, case.phases))
        yield case.request


@cache
def _provable() -> frozenset[tuple[str, Value]]:
    """The values that the suite's cases ask for, each with the name of its axis."""
    platform = Platform(vendor="any", device_type="any", arch="any")
    standard, linear = standard_cases((1,)), linear_cases()
    cases: tuple[AnyCase, ...] = (*standard, *in_graphs(standard))
    return frozenset(
        (axis.name, value)
        for case in (*cases, *linear, *linear_in_graphs(linear))
        for phase in case.phases
        for axis, value in Question(request=case.request, platform=platform, phase=phase).demands
        if axis.tried
    )


def _outside(
    candidate: Candidate,
    axis: Axis,
    request: Request,
    provable: frozenset[tuple[str, Value]],
) -> Iterator[OutsidePoint]:
    conditions = [axis.condition(clause) for clause in candidate.card.clauses]
    for value, changed, platform in _asked(candidate, axis, request):
        question = Question(request=changed, platform=platform, phase=changed.phases[0])
        wanted = axis.wanted(question)
        if wanted is None or wanted is False:
            continue
        is_served = any(condition.admits(wanted) for condition in conditions)
        # The suite has a few numbers of each axis, and all words and features that can be run
        is_word = bool(axis.tried) and isinstance(wanted, (str, bool))
        if not is_served or (is_word and (axis.name, wanted) not in provable):
            yield OutsidePoint(
                axis=axis.name,
                value=str(value),
                request=changed,
                platform=platform,
                unproven=is_served,
            )


def _asked(
    candidate: Candidate, axis: Axis, request: Request
) -> Iterator[tuple[object, Request, Platform]]:
    """(value, request, platform) for each value that the axis is tried with."""
    platform = candidate.platform
    if axis.name in ELSEWHERE:
        value = ELSEWHERE[axis.name]
        elsewhere = replace(platform, **{axis.name: value})
        yield value, request, elsewhere
        return
    phases = [clause.phase for clause in candidate.card.clauses]
    if axis.name == "tree_windows" and not any(each.admits("verify") for each in phases):
        return
    values: set[Value] = set(axis.tried)
    if axis.values == "numbers" and axis.samples:
        for clause in candidate.card.clauses:
            ends = (axis.condition(clause).nearest(1), axis.condition(clause).nearest(LARGE))
            numbers = [end for end in ends if isinstance(end, int)]
            values.update(near for end in numbers for near in (end - 1, end + 1) if near > 0)
    for value in sorted(values, key=str):
        yield value, request.replace(**_changes(axis, value, request)), platform


def _changes(axis: Axis, value: Value, request: Request) -> dict[str, Any]:
    """The fields to set in the request so that the axis has `value`."""
    if axis.asked_by:
        asked = Request.parse(axis.asked_by)
        changed = {name: getattr(asked, name) for name in asked.origins}
        return {**changed, "custom_mask": False, "phases": ("verify",)}
    if axis.name == "phase":
        return {"phases": (value,)}
    if axis.name == "group_size" and isinstance(value, int):
        return {"num_q_heads": value * (request.num_kv_heads or 1)}
    if axis.name == "num_q_heads":
        return {"num_q_heads": value, "num_kv_heads": 1}
    if axis.name == "num_kv_heads":
        return {"num_q_heads": value, "num_kv_heads": value}
    return {axis.name: value}
