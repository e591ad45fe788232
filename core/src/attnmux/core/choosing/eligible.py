"""Which offers serve which phases, page size and KV dtype aside where they are left open."""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass

from attnmux.core.choosing.judge.axes import Demand, Question
from attnmux.core.choosing.judge.shortcomings import knows
from attnmux.core.choosing.offer.card import Clause, Offer
from attnmux.core.choosing.offer.conditions import ANY
from attnmux.core.choosing.search.problem import Group, Problem, Questions


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Candidate:
    """An offer that serves a group where page size and KV dtype are left open."""

    offer: Offer
    clauses: tuple[list[Clause], ...]
    """For each phase of the group, those that admit what is asked."""


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
