"""Solving: one backend for each phase, one page size and one KV dtype for all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial

from attnmux.core.choosing.ask.policy import Policy
from attnmux.core.choosing.ask.request import Request
from attnmux.core.choosing.ask.values import PHASES, OptionValue
from attnmux.core.choosing.common.frozen import Deferred, FrozenMapping
from attnmux.core.choosing.common.verdict import Coercion, Reason, Verdict
from attnmux.core.choosing.judge.checking import Ranking, prior_rank, standing
from attnmux.core.choosing.judge.shortcomings import shortcomings
from attnmux.core.choosing.machine.platform import Platform
from attnmux.core.choosing.offer.card import Offer
from attnmux.core.choosing.offer.libraries import Libraries, assumed, installed_version
from attnmux.core.choosing.offer.named import complete, read_options
from attnmux.core.choosing.search.assignments import Point, best_assignment
from attnmux.core.choosing.search.problem import Group, Problem, groups_of, opposed
from attnmux.core.choosing.tell.choice import Choice
from attnmux.core.choosing.tell.decision import Decision
from attnmux.core.choosing.tell.refusal import refusal
from attnmux.core.choosing.tell.verdicts import verdicts
from attnmux.core.errors import InvalidInput

__all__ = ["Policy", "solve"]


def solve(
    request: Request,
    platform: Platform,
    offers: Iterable[Offer],
    policy: Policy | None = None,
    *,
    libraries: Libraries = installed_version,
    ranking: Ranking = prior_rank,
) -> Decision:
    """Choose a backend for each requested phase among the `offers` of the plugins, in any order.

    Fewest coercions first; then the best ranks of decode, extend and encoder, in that order; then
    the fewest backends; then the page size that decode's backend prefers.

    Raises NoBackend, with every verdict, where nothing serves the request; UnknownBackend or
    InvalidInput for a name or an option in `policy` that cannot be used; InvalidInput for what is
    no offer, and for two of one address.
    """
    policy = policy or Policy()
    offers = _in_order(offers)
    # What was decided and what is told of it later must not see different libraries
    known = cache(assumed(policy.without, libraries, policy.hypothetical))
    given = read_options(policy.options, offers, libraries)
    problem = Problem(
        request=request,
        platform=platform,
        policy=policy,
        offers=offers,
        groups=groups_of(request, policy, offers, libraries),
        barred=_standings(policy, known),
        ranking=ranking,
        opposed=opposed(offers),
    )
    variants = problem.variants()
    point = best_point(problem, variants)
    if point is None:
        raise refusal(platform, problem.groups, verdicts(problem, variants, None))
    told = Deferred(partial(verdicts, problem, variants, point))
    return _decision(problem, point, given, told)


def _standings(policy: Policy, libraries: Libraries) -> Callable[[Offer], Sequence[Reason]]:
    """`standing`, asked once of each offer."""
    found: dict[str, Sequence[Reason]] = {}

    def barred(offer: Offer) -> Sequence[Reason]:
        if offer.address not in found:
            found[offer.address] = standing(offer, policy, libraries)
        return found[offer.address]

    return barred


def _in_order(offers: Iterable[Offer]) -> tuple[Offer, ...]:
    """By address, whatever the order of the plugins."""
    given = tuple(offers)
    for offer in given:
        if not isinstance(offer, Offer):
            came = f"one of type {type(offer).__name__}"
            expected = "offers, each a card with its plugin, as load_plugins().offers() are"
            raise InvalidInput("offers", came=came, expected=expected)
    counts = Counter(offer.address for offer in given)
    repeated = sorted(address for address, count in counts.items() if count > 1)
    if repeated:
        came = f"{', '.join(repeated)} more than once"
        raise InvalidInput("offers", came=came, expected="each plugin/backend once")
    return tuple(sorted(given, key=lambda offer: offer.address))


def _decision(
    problem: Problem,
    point: Point,
    given: Mapping[str, Mapping[str, OptionValue]],
    candidates: Sequence[Verdict],
) -> Decision:
    request = point.request
    if request.page_size is None or request.kv_dtype is None:
        raise RuntimeError("the search returned an unresolved request")
    chosen = {
        phase: choice_of(offer, given.get(offer.address, {}), _origin(problem.policy, group))
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


def _origin(policy: Policy, group: Group) -> str:
    """Who named the group's backend; nobody named one that stands in for another."""
    given = policy.named_for(group.lead)
    if given is None or group.coercion is not None:
        return ""
    return policy.origins.get(given[0], "user")


def choice_of(offer: Offer, given: Mapping[str, OptionValue], origin: str = "") -> Choice:
    """given: options, as `read_options` reads them; those that are missing have their defaults."""
    return Choice(
        backend=offer.card.name,
        plugin=offer.plugin,
        factory=offer.card.factory,
        options=complete(offer.card, given),
        distribution=offer.distribution,
        version=offer.version,
        origin=origin,
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
