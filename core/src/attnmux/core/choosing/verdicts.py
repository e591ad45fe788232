"""What is told of each candidate in each phase once the search is over."""

from __future__ import annotations

from collections.abc import Sequence

from attnmux.core.choosing.ask.values import PHASES
from attnmux.core.choosing.common.verdict import Reason, Verdict
from attnmux.core.choosing.judge.checking import verdict
from attnmux.core.choosing.judge.shortcomings import Explainer
from attnmux.core.choosing.offer.card import Offer
from attnmux.core.choosing.search.assignments import Point
from attnmux.core.choosing.search.problem import CACHED_LEADS, Group, Problem, Questions, Variant
from attnmux.core.choosing.search.remedies import Remedies
from attnmux.core.choosing.tell.refusal import excluded_reason, joint_reason, together_reason

LAST = 1 << 62
"""Behind every rank."""


def verdicts(
    problem: Problem, variants: Sequence[Variant], point: Point | None
) -> tuple[Verdict, ...]:
    """One for each offer and phase, in an order that does not depend on the order of the cards."""
    plain = variants[0].questions
    # Each group can be served, but at no page size and KV dtype that all share
    conflict = point is None and all(
        any(problem.serves(offer, plain, group.phases) for offer in group.offers)
        for group in problem.groups
    )
    remedies, explainer = Remedies(problem), Explainer(plain)
    found = []
    for offer in problem.offers:
        short = explainer.shortcomings(offer.card)
        for group in problem.groups:
            for phase in group.phases:
                reasons = remedies.told(group, offer, short[phase])
                found.append(
                    _verdict(problem, variants, point, group, phase, offer, reasons, conflict)
                )

    def order(said: Verdict) -> tuple[int, int, str, str]:
        rank = LAST if said.rank is None else said.rank
        return PHASES.index(said.phase), rank, said.backend, said.plugin

    return tuple(sorted(found, key=order))


def _verdict(
    problem: Problem,
    variants: Sequence[Variant],
    point: Point | None,
    group: Group,
    phase: str,
    offer: Offer,
    reasons: list[Reason],
    conflict: bool,
) -> Verdict:
    """`reasons` keep the offer from the phase alone."""
    plain = variants[0].questions
    if reasons and not reasons[0].hint:
        reasons += _excluded(problem, plain, group, offer)
    if not reasons:
        reasons = _joint_reasons(problem, plain, group, offer)
        if not reasons and conflict and offer in group.offers:
            return verdict(offer, phase, [joint_reason(problem.groups, offer, group.lead)], None)
    if not reasons:
        decided = point is not None and problem.serves(offer, point.questions, (phase,))
        questions = point.questions if point is not None and decided else plain
        rank = problem.ranking(offer, questions[phase])
        eligible = _is_eligible(problem, point, group, offer)
        return verdict(offer, phase, (), rank, eligible=eligible)
    for variant in variants[1:]:
        questions = variant.questions
        served = problem.serves(offer, questions, group.phases)
        if served and not _excluded(problem, questions, group, offer):
            rank = problem.ranking(offer, questions[phase])
            eligible = _is_eligible(problem, point, group, offer)
            return verdict(offer, phase, reasons, rank, coerced=True, eligible=eligible)
    return verdict(offer, phase, reasons, None)


def _is_eligible(problem: Problem, point: Point | None, group: Group, offer: Offer) -> bool:
    """Whether the offer could serve the group at the point, beside the winners of the others."""
    if point is None or not problem.serves(offer, point.questions, group.phases):
        return False
    opponents = problem.opponents(offer, group.lead)
    return not any(
        winner.address in opponents and other.lead in CACHED_LEADS and other is not group
        for other, winner in zip(problem.groups, point.winners, strict=True)
    )


def _joint_reasons(
    problem: Problem, questions: Questions, group: Group, offer: Offer
) -> list[Reason]:
    """Why an offer that serves a phase alone could still not be taken for it."""
    served = [phase for phase in group.phases if problem.serves(offer, questions, (phase,))]
    if len(served) < len(group.phases):
        return [together_reason(group, served)]
    return _excluded(problem, questions, group, offer)


def _excluded(problem: Problem, questions: Questions, group: Group, offer: Offer) -> list[Reason]:
    """A reason where all that could serve the other of decode and extend exclude the offer."""
    opponents = problem.opponents(offer, group.lead)
    for other in problem.groups if opponents else ():
        if other is group or other.lead not in CACHED_LEADS:
            continue
        serving = [
            candidate
            for candidate in other.offers
            if problem.serves(candidate, questions, other.phases)
        ]
        if serving and opponents.issuperset(candidate.address for candidate in serving):
            return [excluded_reason(group, offer, other, serving)]
    return []
