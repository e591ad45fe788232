"""Why a card does not serve a question, and what would make it."""

from __future__ import annotations

from attnmux.core.choosing.axes import AXES, Axis, Question, admits, failing
from attnmux.core.choosing.card import CONTRACTS, BackendCard, Clause
from attnmux.core.choosing.conditions import specifiers
from attnmux.core.choosing.platform import Platform
from attnmux.core.choosing.request import Request
from attnmux.core.choosing.verdict import Reason


def question_of(
    request: Request, platform: Platform, phase: str, *, hypothetical: bool
) -> Question:
    """What `request` asks in a phase before its unset values are decided."""
    return Question(
        request=request,
        platform=platform,
        phase=phase,
        page_size=request.page_size,
        kv_dtype=request.kv_dtype or request.dtype,
        hypothetical=hypothetical,
    )


def serving_clause(
    card: BackendCard, question: Question, axes: tuple[Axis, ...] = AXES
) -> Clause | None:
    """The first clause that serves the question."""
    return next((clause for clause in card.clauses if admits(clause, question, axes)), None)


def is_served(card: BackendCard, question: Question, axes: tuple[Axis, ...] = AXES) -> bool:
    """Whether `shortcomings` would be empty, without the cost of saying why."""
    if serving_clause(card, question, axes) is None:
        return False
    return not _undeclared_axes(card, question, axes)


def shortcomings(
    card: BackendCard, question: Question, axes: tuple[Axis, ...] = AXES
) -> list[Reason]:
    """Why the card does not serve the question: [] where it does.

    The reasons are those of the clause that comes nearest: fewest conditions that do not hold,
    those of the machine counting more than what the asker can change. Hints are left out where
    following them all would not remove them all.
    """
    undeclared = [
        _undeclared(axis, card, question) for axis in _undeclared_axes(card, question, axes)
    ]
    if serving_clause(card, question, axes) is not None:
        return undeclared
    if not card.clauses:
        return [Reason(code="NO_CLAUSE", axis="clauses", wanted="one that fits", offered="none")]
    failures = [(clause, failing(clause, question, axes)) for clause in card.clauses]
    clause, failed = min(failures, key=lambda pair: sum(axis.weight for axis in pair[1]))
    told = _hints(clause, question, axes)
    reasons = [axis.reason(clause, question, told.get(axis.name, "")) for axis in failed]
    return undeclared + reasons


def _undeclared_axes(card: BackendCard, question: Question, axes: tuple[Axis, ...]) -> list[Axis]:
    """Axes that are asked about and are younger than every contract the card states."""
    later = [axis for axis in axes if axis.since != CONTRACTS[0] and axis.asked(question)]
    return [axis for axis in later if not specifiers(card.contract).contains(axis.since)]


def _undeclared(axis: Axis, card: BackendCard, question: Question) -> Reason:
    return Reason(
        code="UNDECLARED_FEATURE",
        axis=axis.name,
        wanted=str(axis.wanted(question)),
        offered=f"a contract ({card.contract}) that does not know it",
    )


def _hints(clause: Clause, question: Question, axes: tuple[Axis, ...]) -> dict[str, str]:
    """By axis, the change that helps: together they leave nothing that the asker could change.

    A change can call for another, on an axis that did not fail: an unset KV dtype follows the
    dtype. Such a change is told along with the first.
    """
    changes: dict[str, str] = {}
    first: tuple[str, ...] = ()
    for _ in axes:
        request = question.request.replace(**changes)
        changed = question_of(
            request, question.platform, question.phase, hypothetical=question.hypothetical
        )
        open_axes = [axis for axis in failing(clause, changed, axes) if axis.settable]
        first = first or tuple(axis.name for axis in open_axes)
        if not open_axes:
            told = {name: f"{name}={changes[name]}" for name in first}
            along = [f"{name}={changes[name]}" for name in changes if name not in first]
            return {**told, **({first[0]: ",".join([told[first[0]], *along])} if along else {})}
        if any(axis.name in changes for axis in open_axes):
            break
        changes.update((axis.name, axis.remedy(clause, changed)) for axis in open_axes)
    return {}
