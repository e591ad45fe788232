"""The whole story in one function: a backend for each phase, one page size, one KV dtype."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial

from attnmux.core.cards.advisory import Advisory
from attnmux.core.cards.card import Offer
from attnmux.core.cards.named import read_options
from attnmux.core.choosing.advisories import findings, notes
from attnmux.core.choosing.assignments import (
    Assignment,
    best_assignment,
    best_together,
    coercions,
)
from attnmux.core.choosing.checking import Accuracy, Ranking, by_card, prior_rank, standing
from attnmux.core.choosing.choice import Choice
from attnmux.core.choosing.decision import Decision
from attnmux.core.choosing.parts import DISPENSABLE, Parts, absence, installed_part
from attnmux.core.choosing.problem import (
    Problem,
    Variant,
    groups_of,
    opposed,
)
from attnmux.core.choosing.requirements import caveats
from attnmux.core.choosing.verdicts import refusal, verdicts
from attnmux.core.choosing.with_parts import Asking, inside_first, left_by, parts_of
from attnmux.core.facts.errors import InvalidInput, NoBackend
from attnmux.core.facts.frozen import Deferred, FrozenMapping
from attnmux.core.facts.libraries import Libraries, assumed, installed_version
from attnmux.core.facts.platform import Platform
from attnmux.core.facts.policy import Policy
from attnmux.core.facts.questions import Question
from attnmux.core.facts.request import Request
from attnmux.core.facts.sparse import check_decidable
from attnmux.core.facts.values import PHASES, OptionValue, shape_said
from attnmux.core.facts.vendors import EXAMPLE
from attnmux.core.facts.verdicts import Reason


def solve(
    request: Request,
    platform: Platform,
    offers: Iterable[Offer],
    policy: Policy | None = None,
    *,
    libraries: Libraries | None = None,
    ranking: Ranking = prior_rank,
    accuracy: Accuracy = by_card,
    parts: Parts = installed_part,
) -> Decision:
    """Choose a backend for each requested phase among the `offers` of the plugins, in any order.

    The answer has the fewest coercions; then the best ranks of decode, extend and encoder, in that
    order; then the fewest backends; then the page size that decode's backend prefers.

    libraries: those that count. None: those of this environment if the platform is here
    (`Platform.is_here`), else all that a card requires.

    Raises NoBackend, with every verdict, if nothing serves the request; UnknownBackend or
    InvalidInput for a name or an option in `policy` that cannot be used, for arguments of other
    types, for two offers with the same address, and for chosen pages with an open dtype or a page
    size that does not fit the budget.
    """
    policy, offers = Policy() if policy is None else policy, _in_order(offers)
    _check_kinds(request, platform, policy)
    # Of the asker's request: a search tries other page sizes
    check_decidable(request)
    by_address = {offer.address: offer for offer in offers}

    again = partial(
        solve,
        platform=platform,
        offers=offers,
        libraries=libraries,
        ranking=ranking,
        accuracy=accuracy,
        parts=parts,
    )

    def rank(one: Decision, phase: str) -> int:
        question = Question(request=one.request, platform=platform, phase=phase)
        return ranking(by_address[one.phases[phase].address], question).value

    def main(left: Request) -> list[Decision]:
        problems = [
            _problem(each, platform, offers, policy, libraries, ranking, accuracy)
            for each in left.groups()
        ]
        return _decided(left, problems, libraries or installed_version)

    asking = Asking(solve=again, policy=policy, rank=rank)
    always, after_refusal, missing = parts_of(request, parts)
    left = left_by(request, always)
    try:
        mains = main(left)
    except NoBackend as refused:
        for trial in after_refusal:
            tried, used = left_by(left, [trial]), inside_first([trial, *always])
            with suppress(NoBackend):
                return asking.served(main(tried), request, tried, used)
        hints = [absence(name) for name in missing if DISPENSABLE[name]]
        if not hints:
            raise
        raise NoBackend("; ".join([str(refused), *hints]), refused.candidates) from None
    if notes := [absence(name) for name in missing if not DISPENSABLE[name]]:
        mains[0] = replace(mains[0], notes=(*mains[0].notes, *notes))
    return asking.served(mains, request, left, always)


def _decided(request: Request, problems: Sequence[Problem], libraries: Libraries) -> list[Decision]:
    """A decision for each group of layers that are alike, all with one page size and, except groups
    with their own, one KV dtype: each phase has a backend whose card admits all of it.

    Raises NoBackend for the first group that nothing serves, and if no page size and KV dtype
    serves all groups.
    """
    variants = [problem.variants() for problem in problems]
    best = best_together(problems, variants)
    if best is None:
        raise _refused(request, problems, variants)
    options = read_options(problems[0].policy.options, problems[0].offers, libraries)
    return [
        _decision(problem, alike, assignment, options)
        for problem, alike, assignment in zip(problems, variants, best, strict=True)
    ]


def _refused(
    request: Request, problems: Sequence[Problem], variants: Sequence[Sequence[Variant]]
) -> NoBackend:
    if len(problems) == 1:
        return refusal(problems[0], verdicts(problems[0], variants[0], None))
    names = [f"layers with {shape_said(request)}", *map(str, request.other_layers)]
    for name, problem, alike in zip(names, problems, variants, strict=True):
        if best_assignment(problem, alike) is None:
            refused = refusal(problem, verdicts(problem, alike, None))
            return NoBackend(f"{name}: {refused}", refused.candidates)
    where = problems[0].platform.name or str(problems[0].platform)
    said = f"no page size and KV dtype serves {' and '.join(names)} on {where}"
    return NoBackend(f"{said}, though backends serve each alone")


def _problem(
    request: Request,
    platform: Platform,
    offers: tuple[Offer, ...],
    policy: Policy,
    libraries: Libraries | None,
    ranking: Ranking,
    accuracy: Accuracy,
) -> Problem:
    # The search and the verdicts, which may be read later, must see the same libraries
    known = cache(assumed(policy.without, libraries, platform.is_here))
    by_address = {offer.address: offer for offer in offers}

    def barred(address: str) -> Sequence[Reason]:
        offer = by_address[address]
        return [*standing(offer, policy, known), *accuracy(offer, request)]

    def found(address: str) -> Sequence[Advisory]:
        return findings(by_address[address], known)

    return Problem(
        request=request,
        platform=platform,
        policy=policy,
        offers=offers,
        groups=groups_of(request, policy, offers, libraries or installed_version),
        barred=cache(barred),
        ranking=ranking,
        opposed=opposed(offers),
        libraries=known,
        findings=cache(found),
    )


def _check_kinds(request: object, platform: object, policy: object) -> None:
    """Raise InvalidInput for texts and mappings in place of a request or a platform."""
    for name, value, kind, such_as in (
        ("request", request, Request, 'Request.parse("dtype=bf16,page_size=16")'),
        ("platform", platform, Platform, f'Platform.parse("{EXAMPLE}")'),
        ("policy", policy, Policy, "Policy(backend=NAME)"),
    ):
        if not isinstance(value, kind):
            expected = f"a {kind.__name__}, such as {such_as}"
            raise InvalidInput(name, got=f"one of type {type(value).__name__}", expected=expected)


def _in_order(given: object) -> tuple[Offer, ...]:
    """By address, whatever the order of the plugins."""
    offers = []
    for offer in given if isinstance(given, Iterable) else (given,):
        if not isinstance(offer, Offer):
            got = f"one of type {type(offer).__name__}"
            expected = "offers, each a card with its plugin, as Plugins.load().offers() are"
            raise InvalidInput("offers", got=got, expected=expected)
        offers.append(offer)
    counts = Counter(offer.address for offer in offers)
    repeated = sorted(address for address, count in counts.items() if count > 1)
    if repeated:
        got = f"{', '.join(repeated)} more than once"
        raise InvalidInput("offers", got=got, expected="each plugin/backend once")
    return tuple(sorted(offers, key=lambda offer: offer.address))


def _decision(
    problem: Problem,
    variants: Sequence[Variant],
    best: Assignment,
    given: Mapping[str, Mapping[str, OptionValue]],
) -> Decision:
    request = best.variant.request
    if request.page_size is None or request.kv_dtype is None:
        raise RuntimeError("the search returned an unresolved request")
    chosen = {}
    for group, offer in zip(problem.groups, best.winners, strict=True):
        # A companion has no origin: the user named another backend
        origin = "" if group.coercion else problem.policy.origin_of(group.lead)
        choice = Choice.of(offer, given.get(offer.address, {}), origin)
        chosen.update(dict.fromkeys(group.phases, choice))
    return Decision(
        platform=problem.platform,
        request=request,
        page_size=request.page_size,
        kv_dtype=request.kv_dtype,
        phases=FrozenMapping({phase: chosen[phase] for phase in PHASES if phase in chosen}),
        coercions=coercions(problem, best),
        notes=tuple(
            note
            for offer in {winner.address: winner for winner in best.winners}.values()
            for note in caveats(offer.card, problem.platform, problem.libraries)
        )
        + tuple(dict.fromkeys(_findings_noted(problem, best))),
        candidates=Deferred(partial(verdicts, problem, variants, best)),
        is_checked=True,
    )


def _findings_noted(problem: Problem, best: Assignment) -> Iterator[str]:
    """Notes on advisories that concern the winners without refusing them."""
    for group, offer in zip(problem.groups, best.winners, strict=True):
        for phase in group.phases if offer.advisories else ():
            yield from notes(offer, best.variant.questions[phase], problem.findings(offer.address))
