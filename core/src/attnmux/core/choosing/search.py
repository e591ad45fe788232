"""The search behind `solve`: which assignment of backends, page size and KV dtype is best.

The outer loop is over *variants* of the request: as it is first, then with ever more of the values
that may be coerced left unset. Each variant is tried at the page sizes and KV dtypes that its
candidates prefer. At one such point the groups of phases are independent of each other, so that the
best backend of each is the best of all; only where two of those exclude each other are they tried
without the one and without the other.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, groupby

from attnmux.core.choosing.axes import Demand, Question
from attnmux.core.choosing.card import Clause, Offer
from attnmux.core.choosing.conditions import Value, joint_examples
from attnmux.core.choosing.explaining import admitting, serving_clause
from attnmux.core.choosing.groups import CACHED_LEADS, Group
from attnmux.core.choosing.problem import Problem, Questions, Variant
from attnmux.core.choosing.request import Request

FALLBACK_PAGE_SIZE = 1
FALLBACK_KV_DTYPE = "bfloat16"
"""Where neither the request nor the winner has a preference."""


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


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class _Eligible:
    """An offer that serves a group where page size and KV dtype are left open."""

    offer: Offer
    clauses: tuple[list[Clause], ...]
    """For each phase of the group, those that admit what is asked."""


def _common(questions: Iterable[Question]) -> tuple[Demand, ...]:
    """What all of the questions ask, in the order of the axes."""
    asked = [question.demands for question in questions]
    shared = set(asked[0]).intersection(*asked)
    return tuple(demand for demand in asked[0] if demand in shared)


def _beyond(demands: Iterable[Demand], known: Container[Demand]) -> list[Demand]:
    return [demand for demand in demands if demand not in known]


def _eligible(problem: Problem, questions: Questions) -> list[list[_Eligible]]:
    """For each group, the offers that serve all of its phases.

    What all phases ask, the machine first, rules most clauses out, and is asked once.
    """
    everywhere = _common(questions.values())
    near = {
        offer.address: admitting(offer.card, offer.card.clauses, everywhere)
        for offer in problem.offers
    }
    found = []
    for group in problem.groups:
        common = _common(questions[phase] for phase in group.phases)
        shared = _beyond(common, everywhere)
        own = [_beyond(questions[phase].demands, common) for phase in group.phases]
        candidates = []
        for offer in group.offers:
            left = near[offer.address] and admitting(offer.card, near[offer.address], shared)
            clauses = tuple(admitting(offer.card, left, asked) for asked in own) if left else ()
            if clauses and all(clauses) and not problem.barred(offer):
                candidates.append(_Eligible(offer, clauses))
        found.append(candidates)
    return found


def _points(problem: Problem, variant: Variant) -> Iterator[Point]:
    eligible = _eligible(problem, variant.questions)
    if not all(eligible):
        return
    clauses = [
        clause
        for candidates in eligible
        for candidate in candidates
        for admitted in candidate.clauses
        for clause in admitted
    ]
    asked = {phase: set(question.demands) for phase, question in variant.questions.items()}
    for page_size in _page_sizes(variant.request, clauses):
        for kv_dtype in _kv_dtypes(variant.request, clauses):
            resolved = _resolved(variant.request, page_size, kv_dtype)
            questions = problem.questions(resolved)
            # Setting a value can only add demands: no clause that was ruled out comes back
            added = {
                phase: _beyond(question.demands, asked[phase])
                for phase, question in questions.items()
            }
            fitting = [
                [candidate.offer for candidate in candidates if _fits(candidate, group, added)]
                for group, candidates in zip(problem.groups, eligible, strict=True)
            ]
            if all(fitting):
                yield from _assignments(problem, resolved, questions, fitting, variant.dropped)


def _fits(candidate: _Eligible, group: Group, added: Mapping[str, Sequence[Demand]]) -> bool:
    """Whether the candidate meets what a point asks beyond the variant."""
    return all(
        admitting(candidate.offer.card, clauses, added[phase])
        for phase, clauses in zip(group.phases, candidate.clauses, strict=True)
    )


Merit = tuple[int, int]
"""(place among the asker's preferences, rank); the smaller is better."""

Scored = Sequence[tuple[Merit, Offer]]


def _assignments(
    problem: Problem,
    request: Request,
    questions: Questions,
    fitting: Sequence[Sequence[Offer]],
    dropped: tuple[str, ...],
) -> Iterator[Point]:
    """Points at one page size and KV dtype, the best that there is among them."""
    scored = []
    for group, offers in zip(problem.groups, fitting, strict=True):
        question = questions[group.phases[0]]
        scored.append(
            [
                ((problem.policy.preference(offer), problem.ranking(offer, question).value), offer)
                for offer in offers
            ]
        )
    for merits, winners in _compatible(problem, scored):
        tie = _tie(problem, request, questions, winners)
        key = (merits, len({offer.address for offer in winners}), *tie)
        yield Point(key, request, questions, winners, dropped)


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


def _tie(
    problem: Problem, request: Request, questions: Questions, winners: tuple[Offer, ...]
) -> tuple[object, ...]:
    """What breaks a tie: the values that decode's winner prefers, then names, then numbers."""
    clause = serving_clause(winners[0].card, questions[problem.groups[0].phases[0]])
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
