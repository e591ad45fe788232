"""Why a card does not serve a question, and what would make it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache

from attnmux.core.choosing.axes import Demand, Question, admits, failing, meets
from attnmux.core.choosing.card import CONTRACTS, BackendCard, Clause
from attnmux.core.choosing.request import Request
from attnmux.core.choosing.verdict import Reason
from attnmux.core.choosing.version_ranges import within


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
    Hints are left out where following them all would not remove them all.
    """
    undeclared = _undeclared(card, question.demands)
    if not card.clauses:
        return [Reason(code="NO_CLAUSE", axis="clauses", wanted="one that fits", offered="none")]
    failures = [(clause, failing(clause, question)) for clause in card.clauses]
    clause, failed = min(failures, key=lambda pair: _distance(pair[1]))
    if not failed:
        return undeclared
    told = _hints(clause, question, failed)
    return undeclared + [
        axis.reason(clause, value, told.get(axis.name, "")) for axis, value in failed
    ]


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
def _changed(request: Request, changes: tuple[tuple[str, str], ...]) -> Request:
    """Many cards ask for the same change of the same request."""
    return request.replace(**dict(changes))


def _hints(clause: Clause, question: Question, failed: list[Demand]) -> dict[str, str]:
    """By axis, the change that helps: together they leave nothing that the asker could change.

    A change can call for another, on an axis that did not fail: an unset KV dtype follows the
    dtype. Such a change is told along with the first.
    """
    changes: dict[str, str] = {}
    first = [axis.name for axis, _ in failed if axis.settable]
    settable = [(axis, value) for axis, value in failed if axis.settable]
    while settable:
        if any(axis.name in changes for axis, _ in settable):
            return {}
        changes.update((axis.name, axis.remedy(clause, value)) for axis, value in settable)
        changed = replace(question, request=_changed(question.request, tuple(changes.items())))
        settable = [(axis, value) for axis, value in failing(clause, changed) if axis.settable]
    told = {name: f"{name}={changes[name]}" for name in first}
    along = [f"{name}={changes[name]}" for name in changes if name not in first]
    if along:
        told[first[0]] = ",".join([told[first[0]], *along])
    return told
