"""Solving: one backend for each phase, one page size and one KV dtype for all of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from attnmux.core.choosing.card import Offer, OptionValue
from attnmux.core.choosing.checking import (
    Ranking,
    check,
    prior_rank,
    standing,
    verdict,
)
from attnmux.core.choosing.decision import Choice, Decision
from attnmux.core.choosing.explaining import shortcomings
from attnmux.core.choosing.frozen import FrozenMapping
from attnmux.core.choosing.groups import Group, groups_of
from attnmux.core.choosing.libraries import Libraries, assumed, installed_version
from attnmux.core.choosing.options import complete, read_options
from attnmux.core.choosing.platform import Platform
from attnmux.core.choosing.policy import Policy
from attnmux.core.choosing.refusal import joint_reason, refusal, together_reason
from attnmux.core.choosing.request import Request
from attnmux.core.choosing.search import Point, Problem, Questions, Variant, best_point
from attnmux.core.choosing.values import PHASES
from attnmux.core.choosing.verdict import Coercion, Reason, Verdict
from attnmux.core.errors import InvalidInput

__all__ = ["Choice", "Decision", "Policy", "check", "solve"]


def solve(
    request: Request,
    platform: Platform,
    cards: Iterable[Offer],
    policy: Policy | None = None,
    *,
    libraries: Libraries = installed_version,
    ranking: Ranking = prior_rank,
) -> Decision:
    """Choose a backend for each requested phase; the order of `cards` does not matter.

    Fewest coercions first; then the best ranks of decode, extend and encoder, in that order; then
    the fewest backends; then the page size that decode's backend prefers.

    Raises NoBackend, with every verdict, where nothing serves the request; UnknownBackend or
    InvalidInput for a name or an option in `policy` that cannot be used.
    """
    policy = policy or Policy()
    offers = tuple(sorted(cards, key=lambda offer: (offer.address, offer.distribution)))
    _refuse_duplicates(offers)
    known = assumed(policy.without, libraries, policy.hypothetical)
    given = read_options(policy.options, offers, libraries)
    problem = Problem(
        request=request,
        platform=platform,
        policy=policy,
        offers=offers,
        groups=groups_of(request, policy, offers, libraries),
        barred={offer.address: standing(offer, policy, known) for offer in offers},
        ranking=ranking,
    )
    variants = problem.variants()
    point = best_point(problem, variants)
    candidates = _verdicts(problem, variants, point)
    if point is None:
        raise refusal(platform, problem.groups, candidates)
    return _decision(problem, point, given, candidates)


def _refuse_duplicates(offers: tuple[Offer, ...]) -> None:
    addresses = [offer.address for offer in offers]
    repeated = sorted({address for address in addresses if addresses.count(address) > 1})
    if repeated:
        came = f"{', '.join(repeated)} more than once"
        raise InvalidInput("cards", came=came, expected="each plugin/backend once")


def _decision(
    problem: Problem,
    point: Point,
    given: Mapping[str, Mapping[str, OptionValue]],
    candidates: tuple[Verdict, ...],
) -> Decision:
    request = point.request
    if request.page_size is None or request.kv_dtype is None:
        raise RuntimeError("the search returned an unresolved request")
    chosen = {
        phase: _choice(offer, given.get(offer.address, {}))
        for group, offer in zip(problem.groups, point.winners, strict=True)
        for phase in group.phases
    }
    return Decision(
        platform=problem.platform,
        request=request,
        page_size=request.page_size,
        kv_dtype=request.kv_dtype,
        phases=FrozenMapping({phase: chosen[phase] for phase in PHASES if phase in chosen}),
        coercions=_coercions(problem, point),
        candidates=candidates,
    )


def _choice(offer: Offer, given: Mapping[str, OptionValue]) -> Choice:
    return Choice(
        backend=offer.card.name,
        plugin=offer.plugin,
        factory=offer.card.factory,
        options=complete(offer.card, given),
        distribution=offer.distribution,
        version=offer.version,
    )


def _coercions(problem: Problem, point: Point) -> tuple[Coercion, ...]:
    made = [
        replace(group.coercion, new=offer.card.name)
        for group, offer in zip(problem.groups, point.winners, strict=True)
        if group.coercion is not None
    ]
    for field in point.dropped:
        made.append(
            Coercion(
                field=field,
                old=str(getattr(problem.request, field)),
                new=str(getattr(point.request, field)),
                because=_because(problem, point, field),
                origin=problem.request.origins[field],
            )
        )
    return tuple(made)


def _because(problem: Problem, point: Point, field: str) -> str:
    asked = problem.questions(problem.request)
    for group, offer in zip(problem.groups, point.winners, strict=True):
        for phase in group.phases:
            for reason in shortcomings(offer.card, asked[phase]):
                if reason.axis == field:
                    return f"{offer.card.name} for {phase} offers {field} {reason.offered}"
    return "the backends of the phases share no other value"


def _verdicts(
    problem: Problem, variants: Sequence[Variant], point: Point | None
) -> tuple[Verdict, ...]:
    """One for each offer and phase, in an order that does not depend on the order of the cards."""
    plain = variants[0].questions
    # Each group can be served, but at no page size and KV dtype that all share
    conflict = point is None and all(
        any(problem.serves(offer, plain, group.phases) for offer in group.offers)
        for group in problem.groups
    )
    found = [
        _verdict(problem, variants, point, group, phase, offer, conflict=conflict)
        for group in problem.groups
        for phase in group.phases
        for offer in problem.offers
    ]
    last = 1 << 62

    def order(said: Verdict) -> tuple[int, int, str, str]:
        rank = last if said.rank is None else said.rank
        return PHASES.index(said.phase), rank, said.backend, said.plugin

    return tuple(sorted(found, key=order))


def _verdict(
    problem: Problem,
    variants: Sequence[Variant],
    point: Point | None,
    group: Group,
    phase: str,
    offer: Offer,
    *,
    conflict: bool,
) -> Verdict:
    plain = variants[0].questions
    reasons = [*problem.barred[offer.address], *shortcomings(offer.card, plain[phase])]
    if not reasons:
        reasons = _joint_reasons(problem, plain, group, offer, conflict=conflict)
        if reasons:
            return verdict(offer, phase, reasons, None)
        decided = point is not None and problem.serves(offer, point.questions, (phase,))
        questions = point.questions if point is not None and decided else plain
        return verdict(offer, phase, (), problem.ranking(offer.card, questions[phase]))
    for variant in variants[1:]:
        if problem.serves(offer, variant.questions, group.phases):
            rank = problem.ranking(offer.card, variant.questions[phase])
            return verdict(offer, phase, reasons, rank, coerced=True)
    return verdict(offer, phase, reasons, None)


def _joint_reasons(
    problem: Problem, questions: Questions, group: Group, offer: Offer, *, conflict: bool
) -> list[Reason]:
    """Why an offer that serves a phase alone could still not be taken for it."""
    served = [phase for phase in group.phases if problem.serves(offer, questions, (phase,))]
    if len(served) < len(group.phases):
        return [together_reason(group, served)]
    if conflict and offer in group.offers:
        return [joint_reason(problem.groups, offer, group.phases[0])]
    return []
