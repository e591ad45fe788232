"""Which offers serve which phases, and at which page sizes and KV dtypes all phases are served."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass

from attnmux.core.choosing.axes import Demand, Question
from attnmux.core.choosing.card import Clause, Offer
from attnmux.core.choosing.conditions import ANY, joint_examples, until_spared
from attnmux.core.choosing.dtypes import DTYPES
from attnmux.core.choosing.explaining import admits_any, knows
from attnmux.core.choosing.groups import Group
from attnmux.core.choosing.problem import Problem, Questions, Variant
from attnmux.core.choosing.request import Request

FALLBACK_PAGE_SIZE = 1
FALLBACK_KV_DTYPE = "bfloat16"
"""Where neither the request nor the winner has a preference."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Candidate:
    """An offer that serves a group where page size and KV dtype are left open."""

    offer: Offer
    clauses: tuple[list[Clause], ...]
    """For each phase of the group, those that admit what is asked."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Opening:
    """A page size and a KV dtype at which every group is served."""

    request: Request
    """Resolved: page size and KV dtype are set."""
    questions: Questions
    fitting: tuple[tuple[Offer, ...], ...]
    """For each group, the offers that serve it here."""


Stated = list[tuple[Offer, Clause]]
"""Clauses, each with the offer that states it."""


def eligible(problem: Problem, questions: Questions) -> list[list[Candidate]]:
    """For each group, the offers that serve all of its phases.

    What all phases ask, the machine first, rules most clauses out, and is asked once.
    """
    everywhere = _common(questions.values())
    stated = [(offer, clause) for offer in problem.offers for clause in offer.card.clauses]
    near = _meeting(stated, everywhere)
    return [_serving(problem, questions, group, near, everywhere) for group in problem.groups]


def _serving(
    problem: Problem, questions: Questions, group: Group, near: Stated, met: Container[Demand]
) -> list[Candidate]:
    """Of the offers that state `near`, those that serve the group. `met` was asked before."""
    if group.offers is not problem.offers:
        own = {offer.address for offer in group.offers}
        near = [pair for pair in near if pair[0].address in own]
    common = _common(questions[phase] for phase in group.phases)
    near = _meeting(near, _beyond(common, met))
    by_phase = []
    for phase in group.phases:
        clauses: dict[str, list[Clause]] = {}
        for offer, clause in _meeting(near, _beyond(questions[phase].demands, common)):
            clauses.setdefault(offer.address, []).append(clause)
        by_phase.append(clauses)
    found = []
    for offer in {offer.address: offer for offer, _ in near}.values():
        served = all(offer.address in clauses for clauses in by_phase)
        known = (knows(offer.card, questions[phase].demands) for phase in group.phases)
        if served and all(known) and not problem.barred(offer):
            found.append(Candidate(offer, tuple(part[offer.address] for part in by_phase)))
    return found


def _common(questions: Iterable[Question]) -> tuple[Demand, ...]:
    """What all of the questions ask, in the order of the axes."""
    asked = [question.demands for question in questions]
    shared = set(asked[0]).intersection(*asked)
    return tuple(demand for demand in asked[0] if demand in shared)


def _beyond(demands: Iterable[Demand], known: Container[Demand]) -> list[Demand]:
    return [demand for demand in demands if demand not in known]


def _meeting(stated: Stated, demands: Iterable[Demand]) -> Stated:
    """The clauses that meet the demands: demand by demand, since few clauses outlast the first."""
    for axis, value in demands:
        name = axis.name
        stated = [
            pair
            for pair in stated
            if (condition := getattr(pair[1], name)) is ANY or condition.admits(value)
        ]
    return stated


def openings(
    problem: Problem, variant: Variant, candidates: Sequence[Sequence[Candidate]]
) -> Iterator[Opening]:
    """Where all groups are served: if any page size and KV dtype is such a place, one of these is.

    `candidates` are those of the variant, for each group.
    """
    if not all(candidates):
        return
    clauses = [
        clause
        for group in candidates
        for candidate in group
        for admitted in candidate.clauses
        for clause in admitted
    ]
    opened = variant.questions
    for page_size in _page_sizes(variant.request, clauses):
        for kv_dtype in _kv_dtypes(variant.request, clauses):
            resolved = _resolved(variant.request, page_size, kv_dtype)
            questions = problem.questions(resolved, opened)
            # Setting a value can only add demands: no clause that was ruled out comes back
            added = {
                phase: question.demands[len(opened[phase].demands) :]
                for phase, question in questions.items()
            }
            fitting = tuple(
                tuple(
                    candidate.offer
                    for candidate in found
                    if _fits(candidate, [added[phase] for phase in group.phases])
                )
                for group, found in zip(problem.groups, candidates, strict=True)
            )
            if all(fitting):
                yield Opening(resolved, questions, fitting)


def _fits(candidate: Candidate, added: Sequence[Sequence[Demand]]) -> bool:
    """Whether the candidate meets what its phases ask beyond the variant."""
    for demands, clauses in zip(added, candidate.clauses, strict=True):
        if demands and not admits_any(candidate.offer.card, clauses, demands):
            return False
    return True


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
    conditions = {clause.kv_dtype for clause in clauses}
    examples = {str(name) for condition in conditions for name in condition.examples()}
    return sorted(examples.union(until_spared((FALLBACK_KV_DTYPE, *DTYPES), conditions)))


def _resolved(request: Request, page_size: int, kv_dtype: str) -> Request:
    decided = {"page_size": page_size, "kv_dtype": kv_dtype}
    unset = {name: value for name, value in decided.items() if getattr(request, name) is None}
    return request.replace(origin="default", **unset) if unset else request
