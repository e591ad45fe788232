"""The values and backends that the asker got instead of those asked for, and why."""

from __future__ import annotations

from dataclasses import replace

from attnmux.core.choosing.common.verdict import Coercion
from attnmux.core.choosing.judge.shortcomings import shortcomings
from attnmux.core.choosing.search.assignments import Assignment
from attnmux.core.choosing.search.problem import Problem


def coercions(problem: Problem, best: Assignment) -> tuple[Coercion, ...]:
    """The named backends that companions replace, and the values that were left unset."""
    made = [
        replace(group.coercion, new=offer.card.name)
        for group, offer in zip(problem.groups, best.winners, strict=True)
        if group.coercion is not None
    ]
    for field in best.variant.dropped:
        made.append(
            Coercion(
                field=field,
                old=str(getattr(problem.request, field)),
                new=str(getattr(best.variant.request, field)),
                because=_because(problem, best, field),
                origin=problem.request.origins[field],
            )
        )
    return tuple(made)


def _because(problem: Problem, best: Assignment, field: str) -> str:
    asked = problem.variant(problem.request).questions
    for group, offer in zip(problem.groups, best.winners, strict=True):
        for phase in group.phases:
            for reason in shortcomings(offer.card, asked[phase]):
                if reason.axis == field:
                    return f"{offer.card.name} for {phase} offers {field} {reason.offered}"
    return "the backends of the phases share no other value"
