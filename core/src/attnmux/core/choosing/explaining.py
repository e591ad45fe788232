"""Why a card does not serve a question, and what would make it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from attnmux.core.choosing.axes import Demand, Question, admits, failing
from attnmux.core.choosing.card import CONTRACTS, BackendCard, Clause
from attnmux.core.choosing.verdict import Reason
from attnmux.core.choosing.version_ranges import within


def serving_clause(card: BackendCard, question: Question) -> Clause | None:
    """The first clause that serves the question."""
    return next((clause for clause in card.clauses if admits(clause, question)), None)


def is_served(card: BackendCard, question: Question) -> bool:
    """Whether `shortcomings` would be empty, without the cost of saying why."""
    return serving_clause(card, question) is not None and not _undeclared(card, question)


def shortcomings(card: BackendCard, question: Question) -> list[Reason]:
    """Why the card does not serve the question: [] where it does.

    The reasons are those of the clause that comes nearest: fewest conditions that do not hold,
    those of the machine counting more than what the asker can change; among equals the one that
    asks for a change of what the engine can do without (a page size, not the breadth of a draft).
    Hints are left out where following them all would not remove them all.
    """
    undeclared = _undeclared(card, question)
    if serving_clause(card, question) is not None:
        return undeclared
    if not card.clauses:
        return [Reason(code="NO_CLAUSE", axis="clauses", wanted="one that fits", offered="none")]
    failures = [(clause, failing(clause, question)) for clause in card.clauses]
    clause, failed = min(failures, key=lambda pair: _distance(pair[1]))
    told = _hints(clause, question, failed)
    return undeclared + [
        axis.reason(clause, value, told.get(axis.name, "")) for axis, value in failed
    ]


def _distance(failed: Iterable[Demand]) -> tuple[int, int]:
    demands = [axis for axis, _ in failed]
    return sum(axis.weight for axis in demands), sum(not axis.droppable for axis in demands)


def _undeclared(card: BackendCard, question: Question) -> list[Reason]:
    """Demands on axes that are younger than every contract the card states."""
    later = [(axis, value) for axis, value in question.demands if axis.since != CONTRACTS[0]]
    return [
        Reason(
            code="UNDECLARED_FEATURE",
            axis=axis.name,
            wanted=str(value),
            offered=f"a contract ({card.contract}) that does not know it",
        )
        for axis, value in later
        if not within(axis.since, card.contract)
    ]


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
        changed = replace(question, request=question.request.replace(**changes))
        settable = [(axis, value) for axis, value in failing(clause, changed) if axis.settable]
    told = {name: f"{name}={changes[name]}" for name in first}
    along = [f"{name}={changes[name]}" for name in changes if name not in first]
    if along:
        told[first[0]] = ",".join([told[first[0]], *along])
    return told
