"""The best assignment: a backend for each group of phases, at one page size and one KV dtype.

The outer loop is over *variants* of the request: first the request itself, then with more and more
coercible values unset. Each variant has its feasible points. At one point the groups are
independent: the best backend of each group is the best assignment, unless two of these backends
exclude each other. `coercions` lists the requested values that an assignment changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, groupby
from operator import itemgetter
from typing import NamedTuple

from attnmux.core.cards.card import Offer
from attnmux.core.choosing.advisories import refusing
from attnmux.core.choosing.points import (
    FALLBACK_KV_DTYPE,
    Point,
    candidates_of,
    clauses_of,
    feasible_points,
)
from attnmux.core.choosing.problem import CACHED_LEADS, Problem, Variant
from attnmux.core.choosing.shortcomings import shortcomings
from attnmux.core.facts.values import Value
from attnmux.core.facts.verdicts import Coercion

FALLBACK_PAGE_SIZE = 1
"""Where neither the request nor the winner has a preference."""

Merit = tuple[int, int]
"""(place among the asker's preferences, rank); the smaller is better."""

Key = tuple[object, ...]
"""A sort key of assignments; the smallest wins."""

Scored = Sequence[tuple[Merit, Offer]]

Storage = tuple[int | None, str | None]
"""(page size, KV dtype); None for the KV dtype that a problem's request sets."""


class Assignment(NamedTuple):
    """A backend for each group, at one point."""

    variant: Variant
    """With page size and KV dtype set."""
    winners: tuple[Offer, ...]
    """One for each group, in the order of the problem's groups."""


def best_assignment(problem: Problem, variants: Sequence[Variant]) -> Assignment | None:
    """The best assignment with the fewest coercions; None if nothing serves the request."""
    for _, alike in groupby(variants, key=lambda variant: len(variant.dropped)):
        assignments = [
            ranked
            for variant in alike
            for point in feasible_points(problem, variant, candidates_of(problem, variant))
            for ranked in _assignments(problem, point)
        ]
        if assignments:
            return min(assignments, key=itemgetter(0))[1]
    return None


def best_together(
    problems: Sequence[Problem], variants: Sequence[Sequence[Variant]]
) -> tuple[Assignment, ...] | None:
    """The best assignment of each problem, all at one page size and one KV dtype, with the fewest
    coercions; then with the best merits, those of earlier problems first. Problems whose request
    sets the KV dtype share only the page size. None if no page size and KV dtype serves all.

    variants: of each problem.
    """
    if len(problems) == 1:
        alone = best_assignment(problems[0], variants[0])
        return None if alone is None else (alone,)
    found = [
        [(variant, candidates_of(problem, variant)) for variant in alike]
        for problem, alike in zip(problems, variants, strict=True)
    ]
    clauses = [
        clause for each in found for _, candidates in each for clause in clauses_of(candidates)
    ]
    by_storage = []
    for problem, each in zip(problems, found, strict=True):
        best: dict[Storage, tuple[Key, Assignment]] = {}
        for variant, candidates in each:
            for point in feasible_points(problem, variant, candidates, clauses):
                request = point[0].request
                is_open = problem.request.kv_dtype is None
                stored = request.page_size, request.kv_dtype if is_open else None
                for (merits, *rest), assignment in _assignments(problem, point):
                    key = (len(variant.dropped), merits, rest)
                    if stored not in best or key < best[stored][0]:
                        best[stored] = key, assignment
        by_storage.append(best)
    all_at = [
        [best.get(stored) or best.get((stored[0], None)) for best in by_storage]
        for stored in by_storage[0]
    ]
    shared = [[candidate for candidate in found if candidate] for found in all_at if all(found)]
    if not shared:
        return None

    def together(found: Sequence[tuple[Key, Assignment]]) -> Key:
        dropped, merits, rest = zip(*(key for key, _ in found), strict=True)
        return sum(dropped), merits, rest

    return tuple(assignment for _, assignment in min(shared, key=together))


def _assignments(problem: Problem, point: Point) -> Iterator[tuple[Key, Assignment]]:
    """Assignments at one point, with the best one among them: the one with the smallest key."""
    variant, fitting = point
    preference, ranking = problem.policy.preference, problem.ranking
    scored = []
    for group, offers in zip(problem.groups, fitting, strict=True):
        question = variant.questions[group.phases[0]]
        scored.append(
            [((preference(offer.names), ranking(offer, question).value), offer) for offer in offers]
        )
    for merits, winners in _compatible(problem, scored):
        tie = _tie(problem, variant, winners)
        key = (merits, len({offer.address for offer in winners}), *tie)
        yield key, Assignment(variant, winners)


def is_compatible(problem: Problem, fitting: Sequence[Sequence[Offer]]) -> bool:
    """Whether each group can have one of its offers without two that exclude each other."""
    scored = [[((0, 0), offer) for offer in offers] for offers in fitting]
    return any(True for _ in _compatible(problem, scored))


def _compatible(
    problem: Problem, scored: Sequence[Scored]
) -> Iterator[tuple[tuple[Merit, ...], tuple[Offer, ...]]]:
    """Merits and winners if no winner excludes another, with the best assignment among them.

    Takes the best backend of each group. If two of them exclude each other, a solution lacks at
    least one of the two: both cases are tried.
    """
    merits = tuple(min(merit for merit, _ in group) for group in scored)
    winners = _fewest(
        [
            [offer for merit, offer in group if merit == best]
            for group, best in zip(scored, merits, strict=True)
        ]
    )
    clash = _clash(problem, winners)
    if not clash:
        yield merits, winners
    for place in clash:
        rest = [(merit, offer) for merit, offer in scored[place] if offer is not winners[place]]
        if rest:
            yield from _compatible(problem, [*scored[:place], rest, *scored[place + 1 :]])


def _clash(problem: Problem, winners: Sequence[Offer]) -> tuple[int, ...]:
    """The places of two winners that exclude each other; empty if none do."""
    for first, other in combinations(range(len(winners)), 2):
        barred = problem.opponents(winners[first].address, problem.groups[first].lead)
        if problem.groups[other].lead in CACHED_LEADS and winners[other].address in barred:
            return first, other
    return ()


def _tie(problem: Problem, variant: Variant, winners: tuple[Offer, ...]) -> Key:
    """Breaks a tie: by the values that decode's winner prefers, then by names, then by numbers."""
    request, demands = variant.request, variant.questions[problem.groups[0].phases[0]].demands
    clause = next(
        (admitting for admitting in winners[0].card.clauses if admitting.meets(demands)), None
    )
    preferred = () if clause is None else clause.page_size.examples()
    stored = () if clause is None else clause.kv_dtype.examples()
    return (
        _place(request.page_size, preferred or (FALLBACK_PAGE_SIZE,)),
        _place(request.kv_dtype, stored or (FALLBACK_KV_DTYPE,)),
        tuple(offer.address for offer in winners),
        (request.page_size, request.kv_dtype),
    )


def _place(value: Value | None, preferred: Sequence[Value]) -> int:
    return preferred.index(value) if value in preferred else len(preferred)


def _fewest(ties: list[list[Offer]]) -> tuple[Offer, ...]:
    """One offer from each list, with as few different ones as possible.

    Taking the offer that is in most lists first is optimal for up to three lists.
    """
    if all(len(offers) == 1 for offers in ties):
        return tuple(offer for (offer,) in ties)
    winners: dict[int, Offer] = {}
    while len(winners) < len(ties):
        places: dict[str, list[int]] = {}
        by_address: dict[str, Offer] = {}
        for place, offers in enumerate(ties):
            for offer in offers if place not in winners else ():
                places.setdefault(offer.address, []).append(place)
                by_address[offer.address] = offer
        address = min(places, key=lambda name: (-len(places[name]), places[name], name))
        winners.update(dict.fromkeys(places[address], by_address[address]))
    return tuple(winners[place] for place in range(len(ties)))


def coercions(problem: Problem, best: Assignment) -> tuple[Coercion, ...]:
    """The named backends that companions replace, and the values that were left unset."""
    changes = [
        replace(group.coercion, new=offer.card.name)
        for group, offer in zip(problem.groups, best.winners, strict=True)
        if group.coercion is not None
    ]
    for field in best.variant.dropped:
        changes.append(
            Coercion(
                field=field,
                old=str(getattr(problem.request, field)),
                new=str(getattr(best.variant.request, field)),
                because=_because(problem, best, field),
                origin=problem.request.origins[field],
            )
        )
    return tuple(changes)


def _because(problem: Problem, best: Assignment, field: str) -> str:
    questions = problem.variant(problem.request).questions
    for group, offer in zip(problem.groups, best.winners, strict=True):
        for phase in group.phases:
            for reason in shortcomings(offer.card, questions[phase]):
                if reason.axis == field:
                    return f"{offer.card.name} for {phase} offers {field} {reason.offered}"
            found = problem.findings(offer.address) if offer.advisories else ()
            for each in refusing(offer, questions[phase], found):
                return f"{offer.card.name} for {phase} has the finding {each.id}: {each.source}"
    return "the backends of the phases share no other value"
