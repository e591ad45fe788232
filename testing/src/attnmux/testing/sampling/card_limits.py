"""Requests and machines that a card must refuse: those just outside its limits, and those that no
case of the suite can ask for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import product
from typing import Any

from attnmux.core import Platform, Request
from attnmux.core.plugin import BackendCard
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
    if not candidate.stands:  # which may change, while points are kept
        return ()
    return _points(candidate.card, candidate.platform, candidate.plugin)


@lru_cache(maxsize=64)
def _points(card: BackendCard, platform: Platform, plugin: str) -> tuple[OutsidePoint, ...]:
    """Like `outside_points`, once for all suites of a backend."""
    candidate = Candidate(card=card, platform=platform, plugin=plugin)
    points: dict[str, OutsidePoint] = {}
    tried = {axis: _tried(card, axis) for axis in AXES}
    for request in _plain_requests(candidate):
        for axis, values in tried.items():
            unknown = [value for value in values if f"{axis.name}={value}" not in points]
            for point in _outside(candidate, axis, unknown, request):
                points[point.name] = point
    return tuple(points.values())


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
    clauses = candidate.card.clauses
    wanted: set[tuple[str, tuple[str, ...]]] = {
        (kind, (phase,))
        for kind, phase in product(Request.KINDS, Request.PHASES)
        if any(clause.kind.admits(kind) and clause.phase.admits(phase) for clause in clauses)
    }
    unseen = (case for case in candidate.cases() if (case.kind, case.phases) in wanted)
    for case in candidate.admitted(unseen):
        wanted.remove((case.kind, case.phases))
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
    values: Iterable[Any],
    request: Request,
) -> Iterator[OutsidePoint]:
    """The values that lie beyond the axis's limits for the request."""
    conditions = [axis.condition(clause) for clause in candidate.card.clauses]
    for value in values:
        changed, platform = _asked(candidate, axis, value, request)
        question = Question(request=changed, platform=platform, phase=changed.phases[0])
        wanted = axis.wanted(question)
        if wanted is None or wanted is False:
            continue
        is_served = any(condition.admits(wanted) for condition in conditions)
        # The suite has a few numbers of each axis, and all words and features that can be run
        is_word = bool(axis.tried) and isinstance(wanted, (str, bool))
        if not is_served or (is_word and (axis.name, wanted) not in _provable()):
            yield OutsidePoint(
                axis=axis.name,
                value=str(value),
                request=changed,
                platform=platform,
                unproven=is_served,
            )


def _tried(card: BackendCard, axis: Axis) -> Sequence[Any]:
    """The values of the axis that are tried on the card."""
    if axis.name in ELSEWHERE:
        return [ELSEWHERE[axis.name]]
    if axis.name == "tree_windows" and not any(c.phase.admits("verify") for c in card.clauses):
        return []
    values: set[Value] = set(axis.tried)
    if axis.values == "numbers" and axis.samples:
        for clause in card.clauses:
            ends = (axis.condition(clause).nearest(1), axis.condition(clause).nearest(LARGE))
            numbers = [end for end in ends if isinstance(end, int)]
            values.update(near for end in numbers for near in (end - 1, end + 1) if near > 0)
    return sorted(values, key=str)


def _asked(
    candidate: Candidate,
    axis: Axis,
    value: Any,  # noqa: ANN401  # of any axis
    request: Request,
) -> tuple[Request, Platform]:
    """The request and the platform with the value."""
    if axis.name in ELSEWHERE:
        return request, replace(candidate.platform, **{axis.name: value})
    return request.replace(**_changes(axis, value, request)), candidate.platform


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
