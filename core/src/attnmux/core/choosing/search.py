"""The search behind `solve`: which assignment of backends, page size and KV dtype is best.

The outer loop is over *variants* of the request: as it is first, then with ever more of the values
that may be coerced left unset. Each variant is tried at the page sizes and KV dtypes that its
candidates prefer. At one such point the groups of phases are independent of each other, so that the
best backend of each is the best of all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, groupby
from typing import Any

from attnmux.core.choosing.axes import AXES, Question
from attnmux.core.choosing.card import Clause, Offer
from attnmux.core.choosing.checking import Ranking
from attnmux.core.choosing.conditions import Value, joint_examples
from attnmux.core.choosing.explaining import is_served, serving_clause
from attnmux.core.choosing.groups import Group
from attnmux.core.choosing.platform import Platform
from attnmux.core.choosing.policy import Policy
from attnmux.core.choosing.request import Request
from attnmux.core.choosing.verdict import Reason

FALLBACK_PAGE_SIZE = 1
FALLBACK_KV_DTYPE = "bfloat16"
"""Where neither the request nor the winner has a preference."""

OTHERS_VALUES = ("model", "platform", "default")
"""Origins whose values may be coerced without leave: nobody insisted on them."""


Questions = Mapping[str, Question]
"""What a request asks, by phase."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False, repr=False)
class Variant:
    """The request with some of the values that may be coerced left unset."""

    dropped: tuple[str, ...]
    request: Request
    questions: Questions


@dataclass(frozen=True, kw_only=True, slots=True, eq=False, repr=False)
class Problem:
    """What stays the same during the search."""

    request: Request
    platform: Platform
    policy: Policy
    offers: tuple[Offer, ...]
    groups: tuple[Group, ...]
    barred: Mapping[str, Sequence[Reason]]
    """By address: what keeps an offer out whatever is asked."""
    ranking: Ranking

    def questions(self, request: Request) -> Questions:
        return {
            phase: Question(
                request=request,
                platform=self.platform,
                phase=phase,
                hypothetical=self.policy.hypothetical,
            )
            for phase in request.phases
        }

    def serves(self, offer: Offer, questions: Questions, phases: Iterable[str]) -> bool:
        """Whether the offer serves all of `phases`."""
        if self.barred[offer.address]:
            return False
        return all(is_served(offer.card, questions[phase]) for phase in phases)

    def preference(self, offer: Offer) -> int:
        """The offer's place among the asker's preferences, before any rank."""
        names = (offer.address, offer.card.name, *offer.card.aliases)
        places = [place for place, name in enumerate(self.policy.prefer) if name in names]
        return min(places, default=len(self.policy.prefer))

    def variants(self) -> tuple[Variant, ...]:
        """The request as it is, then with any one coercible value unset, any two, …"""
        coercible = [
            axis.name
            for axis in AXES
            if axis.droppable
            and getattr(self.request, axis.name)
            and (self.policy.allow_coercion or self.request.origins[axis.name] in OTHERS_VALUES)
        ]
        sets = (
            dropped
            for number in range(len(coercible) + 1)
            for dropped in combinations(coercible, number)
        )
        return tuple(map(self._variant, sets))

    def _variant(self, dropped: tuple[str, ...]) -> Variant:
        unset: dict[str, Any] = dict.fromkeys(dropped)
        request = self.request.replace(**unset) if dropped else self.request
        return Variant(dropped=dropped, request=request, questions=self.questions(request))


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
    eligible = [
        [offer for offer in group.offers if problem.serves(offer, variant.questions, group.phases)]
        for group in problem.groups
    ]
    if not all(eligible):
        return
    clauses = [clause for offers in eligible for offer in offers for clause in offer.card.clauses]
    for page_size in _page_sizes(variant.request, clauses):
        for kv_dtype in _kv_dtypes(variant.request, clauses):
            resolved = _resolved(variant.request, page_size, kv_dtype)
            questions = problem.questions(resolved)
            fitting = [
                [offer for offer in offers if problem.serves(offer, questions, group.phases)]
                for group, offers in zip(problem.groups, eligible, strict=True)
            ]
            if all(fitting):
                yield _point(problem, resolved, questions, fitting, variant.dropped)


def _point(
    problem: Problem,
    request: Request,
    questions: Questions,
    fitting: list[list[Offer]],
    dropped: tuple[str, ...],
) -> Point:
    merits, ties = [], []
    for group, offers in zip(problem.groups, fitting, strict=True):
        question = questions[group.phases[0]]
        merit = {
            offer.address: (problem.preference(offer), problem.ranking(offer.card, question))
            for offer in offers
        }
        best = min(merit.values())
        merits.append(best)
        ties.append([offer for offer in offers if merit[offer.address] == best])
    winners = _fewest(ties)
    clause = serving_clause(winners[0].card, questions[problem.groups[0].phases[0]])
    preferred = () if clause is None else clause.page_size.examples()
    stored = () if clause is None else clause.kv_dtype.examples()
    key = (
        tuple(merits),
        len({offer.address for offer in winners}),
        _place(request.page_size, preferred or (FALLBACK_PAGE_SIZE,)),
        _place(request.kv_dtype, stored or (FALLBACK_KV_DTYPE,)),
        tuple(offer.address for offer in winners),
        (request.page_size, request.kv_dtype),
    )
    return Point(key, request, questions, winners, dropped)


def _fewest(ties: list[list[Offer]]) -> tuple[Offer, ...]:
    """One offer of each list, as few different ones as possible.

    Taking the offer that is in most lists first is optimal for up to three lists.
    """
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


def _page_sizes(request: Request, clauses: Sequence[Clause]) -> list[int]:
    """Enough sizes that, if any size serves all groups, one of these does."""
    if request.page_size is not None:
        return [request.page_size]
    examples = joint_examples(clause.page_size for clause in clauses)
    return sorted(examples | {FALLBACK_PAGE_SIZE})


def _kv_dtypes(request: Request, clauses: Sequence[Clause]) -> list[str]:
    """The request's, else that of the model; where both are unset, any that a candidate stores."""
    given = request.kv_dtype or request.dtype
    if given is not None:
        return [given]
    examples = {str(name) for clause in clauses for name in clause.kv_dtype.examples()}
    return sorted(examples | {FALLBACK_KV_DTYPE})


def _resolved(request: Request, page_size: int, kv_dtype: str) -> Request:
    decided = {"page_size": page_size, "kv_dtype": kv_dtype}
    unset = {name: value for name, value in decided.items() if getattr(request, name) is None}
    return request.replace(origin="default", **unset)


def _place(value: Value | None, preferred: Sequence[Value]) -> int:
    return preferred.index(value) if value in preferred else len(preferred)
