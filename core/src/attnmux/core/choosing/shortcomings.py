"""Why a card does not serve a question, and which changes of the request would help."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from attnmux.core.cards.card import BackendCard
from attnmux.core.cards.clause import Clause
from attnmux.core.facts.axis import Demand
from attnmux.core.facts.questions import Question
from attnmux.core.facts.request import Request
from attnmux.core.facts.verdicts import Reason

Failure = tuple[Clause, Sequence[Demand]]
"""A clause, and the demands that it does not meet."""


def admits_any(clauses: Iterable[Clause], demands: Sequence[Demand]) -> bool:
    """Whether one of the clauses meets the demands."""
    return any(clause.meets(demands) for clause in clauses)


def shortcomings(card: BackendCard, question: Question) -> list[Reason]:
    """Why the card does not serve the question: [] if it does.

    The reasons are those of the nearest clause: the one with the fewest failures. Failures of the
    machine weigh more than values that the asker can change. Among equals, it is the one that needs
    changes of values that the engine can do without (a page size, not the breadth of a draft).
    Either all reasons have a hint or none has, as following only some would not help.
    """
    failures = [(clause, [*clause.failing(question.demands)]) for clause in card.clauses]
    return _reasons(question, failures)


def shortcomings_by_phase(
    card: BackendCard, questions: Mapping[str, Question], phases: Mapping[Demand, Sequence[str]]
) -> dict[str, list[Reason]]:
    """`shortcomings` for each question of a request.

    phases: `demands_of` the questions. Most phases share most demands: a clause meets each once.
    """
    failures: dict[str, list[tuple[Clause, list[Demand]]]] = {phase: [] for phase in questions}
    for clause in card.clauses:
        for failure in failures.values():
            failure.append((clause, []))
        for demand in clause.failing(phases):
            for phase in phases[demand]:
                failures[phase][-1][1].append(demand)
    return {phase: _reasons(questions[phase], failure) for phase, failure in failures.items()}


def _reasons(question: Question, failures: Sequence[Failure]) -> list[Reason]:
    if not failures:
        return [Reason(code="NO_CLAUSE", axis="clauses", wanted="one that fits", offered="none")]
    clause, failed = _nearest(failures)
    hints = _hints(failed, _changes(clause, question, failed))
    return [axis.reason(clause, value, hints.get(axis.name, "")) for axis, value in failed]


def remedy(card: BackendCard, question: Question) -> Mapping[str, str] | None:
    """The fields to change, with their new values, so that the card serves the question: {} if
    it does already, None if no change helps."""
    if not card.clauses:
        return None
    clause, failed = _nearest(
        [(option, [*option.failing(question.demands)]) for option in card.clauses]
    )
    return _changes(clause, question, failed) or None if failed else {}


def _nearest(failures: Sequence[Failure]) -> Failure:
    def distance(failure: Failure) -> tuple[int, int]:
        weight = needed = 0
        for axis, _ in failure[1]:
            weight += axis.weight
            needed += not axis.droppable
        return weight, needed

    return min(failures, key=distance)


@lru_cache(maxsize=1024)
def changed(request: Request, changes: tuple[tuple[str, str], ...]) -> Request:
    """The request with the changes. Many cards need the same change of the same request."""
    return request.replace(**dict(changes))


def _changes(clause: Clause, question: Question, failed: Sequence[Demand]) -> dict[str, str]:
    """By field, the values with which the clause serves the question; {} if none are enough.

    A change can make another axis fail: an unset KV dtype follows the dtype.
    """
    changes: dict[str, str] = {}
    while failed:
        if any(not axis.settable or axis.name in changes for axis, _ in failed):
            return {}
        changes.update((axis.name, axis.remedy(clause, value)) for axis, value in failed)
        request = changed(question.request, tuple(changes.items()))
        failed = [*clause.failing(replace(question, request=request, demands=()).demands)]
    return changes


def _hints(failed: Sequence[Demand], changes: Mapping[str, str]) -> dict[str, str]:
    """The changes as hints by axis. The first hint includes changes on axes that did not fail."""
    if not changes:
        return {}
    first = [axis.name for axis, _ in failed]
    hints = {name: f"{name}={changes[name]}" for name in first}
    along = [f"{name}={changes[name]}" for name in changes if name not in first]
    hints[first[0]] = ",".join([hints[first[0]], *along])
    return hints
