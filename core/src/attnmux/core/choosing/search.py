"""The search behind `solve`: which assignment of backends, page size and KV dtype is best.

The outer loop is over *variants* of the request: as it is first, then with ever more of the values
that may be coerced left unset. Each variant is tried at the page sizes and KV dtypes that its
candidates prefer. At one such point the groups of phases are independent of each other, so that the
best backend of each is the best of all; only where two of those exclude each other are they tried
without the one and without the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, groupby

from attnmux.core.choosing.ask.request import Request
from attnmux.core.choosing.judge.shortcomings import serving_clause
from attnmux.core.choosing.offer.card import Offer
from attnmux.core.choosing.offer.conditions import Value
from attnmux.core.choosing.search.points import (
    FALLBACK_KV_DTYPE,
    FALLBACK_PAGE_SIZE,
    Opening,
    candidates_of,
    feasible_points,
)
from attnmux.core.choosing.search.problem import CACHED_LEADS, Problem, Questions, Variant


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Point:
    """An assignment that serves everything."""

    key: tuple[object, ...]
    """The smallest wins."""
    request: Request
    """Resolved: page size and KV dtype are set."""
    questions: Questions
    winners: tuple[Offer, ...]
    """One for each group, in the order of the problem's groups."""
    dropped: tuple[str, ...]
    """Fields of the request that were coerced."""


def best_point(problem: Problem, variants: Sequence[Variant]) -> Point | None:
    """The best assignment with the fewest coercions; None where nothing serves the request."""
    for _, alike in groupby(variants, key=lambda variant: len(variant.dropped)):
        points = [point for variant in alike for point in _points(problem, variant)]
        if points:
            return min(points, key=lambda point: point.key)
    return None


def _points(problem: Problem, variant: Variant) -> Iterator[Point]:
    for opening in openings(problem, variant, eligible(problem, variant.questions)):
        yield from _assignments(problem, opening, variant.dropped)


Merit = tuple[int, int]
"""(place among the asker's preferences, rank); the smaller is better."""

Scored = Sequence[tuple[Merit, Offer]]


def _assignments(problem: Problem, opening: Opening, dropped: tuple[str, ...]) -> Iterator[Point]:
    """Points at one page size and KV dtype, the best that there is among them."""
    scored = []
    for group, offers in zip(problem.groups, opening.fitting, strict=True):
        question = opening.questions[group.phases[0]]
        scored.append(
            [
                ((problem.policy.preference(offer), problem.ranking(offer, question).value), offer)
                for offer in offers
            ]
        )
    for merits, winners in _compatible(problem, scored):
        tie = _tie(problem, opening, winners)
        key = (merits, len({offer.address for offer in winners}), *tie)
        yield Point(key, opening.request, opening.questions, winners, dropped)


def is_compatible(problem: Problem, fitting: Sequence[Sequence[Offer]]) -> bool:
    """Whether each group can have one of its offers without two that exclude each other."""
    scored = [[((0, 0), offer) for offer in offers] for offers in fitting]
    return any(True for _ in _compatible(problem, scored))


def _compatible(
    problem: Problem, scored: Sequence[Scored]
) -> Iterator[tuple[tuple[Merit, ...], tuple[Offer, ...]]]:
    """Merits and winners in which no backend excludes another, the best assignment among them.

    The best backend of each group is taken. Where two of these exclude each other, a solution lacks
    the one or the other.
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
    """The places of two winners that exclude each other; empty where none do."""
    for one, other in combinations(range(len(winners)), 2):
        opponents = problem.opponents(winners[one], problem.groups[one].lead)
        other_lead = problem.groups[other].lead
        if other_lead in CACHED_LEADS and winners[other].address in opponents:
            return one, other
    return ()


def _tie(problem: Problem, opening: Opening, winners: tuple[Offer, ...]) -> tuple[object, ...]:
    """What breaks a tie: the values that decode's winner prefers, then names, then numbers."""
    request = opening.request
    clause = serving_clause(winners[0].card, opening.questions[problem.groups[0].phases[0]])
    preferred = () if clause is None else clause.page_size.examples()
    stored = () if clause is None else clause.kv_dtype.examples()
    return (
        _place(request.page_size, preferred or (FALLBACK_PAGE_SIZE,)),
        _place(request.kv_dtype, stored or (FALLBACK_KV_DTYPE,)),
        tuple(offer.address for offer in winners),
        (request.page_size, request.kv_dtype),
    )


def _fewest(ties: list[list[Offer]]) -> tuple[Offer, ...]:
    """One offer of each list, as few different ones as possible.

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


def _place(value: Value | None, preferred: Sequence[Value]) -> int:
    return preferred.index(value) if value in preferred else len(preferred)
