"""Feasible points: a page size and a KV dtype at which every group of phases has a backend.

First the candidates of every group are found with page size and KV dtype left open. Then each page
size and KV dtype that they prefer is tried.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import count
from math import ceil, lcm
from typing import TypeVar

from attnmux.core.cards.card import Offer
from attnmux.core.cards.clause import Clause
from attnmux.core.cards.conditions import ANY, Condition, Excluding, Range
from attnmux.core.choosing.advisories import USUAL_PAGES
from attnmux.core.choosing.problem import Group, Problem, Variant
from attnmux.core.choosing.shortcomings import admits_any
from attnmux.core.facts.axis import Demand
from attnmux.core.facts.questions import Question, Questions
from attnmux.core.facts.request import Request
from attnmux.core.facts.values import DTYPES

V = TypeVar("V")

FALLBACK_KV_DTYPE = "bfloat16"
"""Where neither the request nor a backend has a preference."""

Stated = list[tuple[Offer, Clause]]
"""Clauses, each with its offer."""

Candidate = tuple[Offer, tuple[list[Clause], ...]]
"""An offer that serves a group with page size and KV dtype left open, and for each phase of the
group the clauses that admit it."""


Point = tuple[Variant, tuple[tuple[Offer, ...], ...]]
"""The variant with page size and KV dtype set, and for each group the offers that serve it."""


def candidates_of(problem: Problem, variant: Variant) -> list[list[Candidate]]:
    """For each group, the offers that serve all of its phases.

    The demands that all phases share, such as the machine's, come first and only once: they rule
    most clauses out.
    """
    shared = _shared(variant.questions.values())
    stated = [(offer, clause) for offer in problem.offers for clause in offer.card.clauses]
    near = _meeting(stated, shared)
    return [_serving(problem, variant.questions, group, near, shared) for group in problem.groups]


def _serving(
    problem: Problem, questions: Questions, group: Group, near: Stated, met: Container[Demand]
) -> list[Candidate]:
    """The offers with clauses in `near` that serve the group. `near` meets the demands `met`."""
    if group.offers is not problem.offers:
        own = {offer.address for offer in group.offers}
        near = [pair for pair in near if pair[0].address in own]
    common = _shared(questions[phase] for phase in group.phases)
    near = _meeting(near, [demand for demand in common if demand not in met])
    by_phase = []
    for phase in group.phases:
        clauses: dict[str, list[Clause]] = {}
        rest = [demand for demand in questions[phase].demands if demand not in common]
        for offer, clause in _meeting(near, rest):
            clauses.setdefault(offer.address, []).append(clause)
        by_phase.append(clauses)
    found = []
    for offer in {offer.address: offer for offer, _ in near}.values():
        served = all(offer.address in clauses for clauses in by_phase)
        asked = (questions[phase] for phase in group.phases)
        if served and not problem.barred(offer.address) and not problem.advised(offer, asked):
            found.append((offer, tuple(clauses[offer.address] for clauses in by_phase)))
    return found


def _shared(questions: Iterable[Question]) -> dict[Demand, None]:
    """The demands of all of the questions, in the order of the axes."""
    asked = [question.demands for question in questions]
    shared = set(asked[0]).intersection(*asked)
    return {demand: None for demand in asked[0] if demand in shared}


def _meeting(stated: Stated, demands: Iterable[Demand]) -> Stated:
    """The clauses that meet the demands, demand by demand: few clauses outlast the first."""
    for axis, value in demands:
        name = axis.name
        stated = [
            pair
            for pair in stated
            if (condition := getattr(pair[1], name)) is ANY or condition.admits(value)
        ]
    return stated


def clauses_of(candidates: Sequence[Sequence[Candidate]]) -> list[Clause]:
    """The clauses by which the candidates serve."""
    return [
        clause
        for found in candidates
        for _, by_phase in found
        for admitting in by_phase
        for clause in admitting
    ]


def feasible_points(
    problem: Problem,
    variant: Variant,
    candidates: Sequence[Sequence[Candidate]],
    also: Sequence[Clause] = (),
) -> Iterator[Point]:
    """Points that serve all groups: if any page size and KV dtype does, at least one is found.

    candidates: `candidates_of` the variant. also: clauses of other problems, whose page sizes and
    KV dtypes are tried too.
    """
    if not all(candidates):
        return
    clauses = [*clauses_of(candidates), *also]
    opened = variant.questions
    offers = [offer for found in candidates for offer, _ in found if offer.advisories]
    is_limited = any(problem.findings(offer.address) for offer in offers)
    for page_size in _page_sizes(variant.request, clauses, USUAL_PAGES if is_limited else ()):
        for kv_dtype in _kv_dtypes(variant.request, clauses):
            request = _resolved(variant.request, page_size, kv_dtype)
            resolved = problem.variant(request, variant.dropped, opened)
            # Setting a value only adds demands: a clause that failed before still fails
            added = {
                phase: question.demands[len(opened[phase].demands) :]
                for phase, question in resolved.questions.items()
            }
            fitting = tuple(
                tuple(
                    offer
                    for offer, by_phase in found
                    if all(
                        not added[phase] or admits_any(admitting, added[phase])
                        for phase, admitting in zip(group.phases, by_phase, strict=True)
                    )
                    and not problem.advised(offer, (resolved.questions[p] for p in group.phases))
                )
                for group, found in zip(problem.groups, candidates, strict=True)
            )
            if all(fitting):
                yield resolved, fitting


def _page_sizes(request: Request, clauses: Sequence[Clause], also: Iterable[int] = ()) -> list[int]:
    """Enough sizes that, if any size serves all groups, one of these does; and `also`."""
    if request.page_size is not None:
        return [request.page_size]
    return sorted(joint_examples(clause.page_size for clause in clauses).union(also))


def _kv_dtypes(request: Request, clauses: Sequence[Clause]) -> list[str]:
    """The request's, else the model's; where both are unset, any that a candidate stores."""
    given = request.kv_dtype or request.dtype
    if given is not None:
        return [given]
    conditions = _apart(clause.kv_dtype for clause in clauses)
    examples = {str(name) for condition in conditions for name in condition.examples()}
    return sorted(examples.union(until_allowed((FALLBACK_KV_DTYPE, *DTYPES), conditions)))


def _resolved(request: Request, page_size: int, kv_dtype: str) -> Request:
    decided = {"page_size": page_size, "kv_dtype": kv_dtype}
    unset = {name: value for name, value in decided.items() if getattr(request, name) is None}
    return request.replace(origin="default", **unset) if unset else request


def joint_examples(conditions: Iterable[Condition]) -> set[int]:
    """Numbers such that, if any number meets one condition of each of several backends, one of
    these does: 1, every example, and the multiples common to any of the steps."""
    known = _apart(conditions)
    ranges = [condition for condition in known if isinstance(condition, Range)]
    steps = {1}
    for condition in ranges:
        steps |= {lcm(step, condition.step) for step in steps}
    examples = {
        value for condition in known for value in condition.examples() if isinstance(value, int)
    }
    starts = {max(condition.least, 1) for condition in ranges} | {1}
    firsts = {(ceil(start / step) * step, step) for start in starts for step in steps}
    return examples.union(*(until_allowed(count(first, step), known) for first, step in firsts))


def _apart(conditions: Iterable[Condition]) -> list[Condition]:
    """Each condition once. Cards share most of them; to compare their parts would take longer."""
    return [*{id(condition): condition for condition in conditions}.values()]


def until_allowed(values: Iterable[V], conditions: Iterable[Condition]) -> Iterator[V]:
    """The values up to the first one that no condition excludes. Whichever of the conditions must
    hold, that value is not excluded."""
    excluded = {
        value
        for condition in conditions
        if isinstance(condition, Excluding)
        for value in condition.values
    }
    for value in values:
        yield value
        if value not in excluded:
            return
