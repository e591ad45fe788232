"""Why a card does not serve a question, and what would make it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from attnmux.core.choosing.ask.request import Request
from attnmux.core.choosing.common.verdict import Reason
from attnmux.core.choosing.judge.axes import Demand, Question, admits, asking, failing, meets
from attnmux.core.choosing.offer.card import CONTRACTS, BackendCard, Clause
from attnmux.core.choosing.offer.libraries import within


def serving_clause(card: BackendCard, question: Question) -> Clause | None:
    """The first clause that serves the question."""
    return next((clause for clause in card.clauses if admits(clause, question)), None)


def is_served(card: BackendCard, question: Question) -> bool:
    """Whether `shortcomings` would be empty, without the cost of saying why."""
    return admits_any(card, card.clauses, question.demands)


def admits_any(card: BackendCard, clauses: Iterable[Clause], demands: Sequence[Demand]) -> bool:
    """Whether one of the card's clauses meets the demands, and its contract knows them all."""
    for clause in clauses:
        if meets(clause, demands):
            return knows(card, demands)
    return False


def knows(card: BackendCard, demands: Iterable[Demand]) -> bool:
    """Whether a contract of the card knows every axis that is asked about."""
    for axis, _ in demands:
        if axis.since != CONTRACTS[0] and not within(axis.since, card.contract):
            return False
    return True


def shortcomings(card: BackendCard, question: Question) -> list[Reason]:
    """Why the card does not serve the question: [] where it does.

    The reasons are those of the clause that comes nearest: fewest conditions that do not hold,
    those of the machine counting more than what the asker can change; among equals the one that
    asks for a change of what the engine can do without (a page size, not the breadth of a draft).
    All have a hint, or none has: following some of them would not make the card serve.
    """
    failures = [(clause, failing(clause, question.demands)) for clause in card.clauses]
    return _told(card, question, failures, known=knows(card, question.demands))


class Explainer:
    """The questions of one request, by phase. Most demands are those of several phases, and each
    clause is asked once for all of them."""

    def __init__(self, questions: Mapping[str, Question]) -> None:
        self._questions = questions
        self._asking = asking(questions.values())

    def shortcomings(self, card: BackendCard) -> dict[str, list[Reason]]:
        """`shortcomings` of the card, by phase."""
        failures: dict[str, list[Failure]] = {phase: [] for phase in self._questions}
        for clause in card.clauses:
            failed: dict[str, list[Demand]] = {phase: [] for phase in failures}
            for demand in failing(clause, self._asking):
                for phase in self._asking[demand]:
                    failed[phase].append(demand)
            for phase, found in failures.items():
                found.append((clause, failed[phase]))
        known = knows(card, self._asking)
        return {
            phase: _told(card, question, failures[phase], known=known)
            for phase, question in self._questions.items()
        }


Failure = tuple[Clause, list[Demand]]
"""A clause, and what it does not meet."""


def _told(
    card: BackendCard, question: Question, failures: Sequence[Failure], *, known: bool
) -> list[Reason]:
    """The reasons, from what each clause fails; `known`: no axis is younger than the contract."""
    if not failures:
        return [Reason(code="NO_CLAUSE", axis="clauses", wanted="one that fits", offered="none")]
    undeclared = [] if known else _undeclared(card, question.demands)
    clause, failed = _nearest(failures)
    told = {} if undeclared else _hints(failed, _changes(clause, question, failed))
    return undeclared + [
        axis.reason(clause, value, told.get(axis.name, "")) for axis, value in failed
    ]


def remedy(card: BackendCard, question: Question) -> Mapping[str, str] | None:
    """The fields to change, and to what, so that the card serves the question: {} where it does,
    None where no change makes it."""
    if not card.clauses or not knows(card, question.demands):
        return None
    clause, failed = _nearest([(one, failing(one, question.demands)) for one in card.clauses])
    return _changes(clause, question, failed) or None if failed else {}


def _nearest(failures: Sequence[Failure]) -> Failure:
    """That of the clause that comes nearest."""
    return min(failures, key=lambda pair: _distance(pair[1]))


def _distance(failed: Iterable[Demand]) -> tuple[int, int]:
    weight = needed = 0
    for axis, _ in failed:
        weight += axis.weight
        needed += not axis.droppable
    return weight, needed


def _undeclared(card: BackendCard, demands: Iterable[Demand]) -> list[Reason]:
    """Demands on axes that are younger than every contract the card states."""
    return [
        Reason(
            code="UNDECLARED_FEATURE",
            axis=axis.name,
            wanted=str(value),
            offered=f"a contract ({card.contract}) that does not know it",
        )
        for axis, value in demands
        if not knows(card, [(axis, value)])
    ]


@lru_cache(maxsize=1024)
def changed(request: Request, changes: tuple[tuple[str, str], ...]) -> Request:
    """Many cards ask for the same change of the same request."""
    return request.replace(**dict(changes))


def _changes(clause: Clause, question: Question, failed: Sequence[Demand]) -> dict[str, str]:
    """By field, the values with which the clause serves the question; {} where none are enough.

    A change can call for another, on an axis that did not fail: an unset KV dtype follows the
    dtype.
    """
    changes: dict[str, str] = {}
    while failed:
        if any(not axis.settable or axis.name in changes for axis, _ in failed):
            return {}
        changes.update((axis.name, axis.remedy(clause, value)) for axis, value in failed)
        request = changed(question.request, tuple(changes.items()))
        failed = failing(clause, replace(question, request=request).demands)
    return changes


def _hints(failed: Sequence[Demand], changes: Mapping[str, str]) -> dict[str, str]:
    """The changes, as hints by axis; those on axes that did not fail go along with the first."""
    if not changes:
        return {}
    first = [axis.name for axis, _ in failed]
    told = {name: f"{name}={changes[name]}" for name in first}
    along = [f"{name}={changes[name]}" for name in changes if name not in first]
    told[first[0]] = ",".join([told[first[0]], *along])
    return told
