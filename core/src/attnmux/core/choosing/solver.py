"""The whole story in one function: a backend for each phase, one page size, one KV dtype."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

from attnmux.core.cards.card import Offer
from attnmux.core.cards.named import read_options
from attnmux.core.choosing.assignments import (
    Assignment,
    best_assignment,
    best_together,
    coercions,
)
from attnmux.core.choosing.checking import Accuracy, Ranking, by_card, prior_rank, standing
from attnmux.core.choosing.choice import Choice, choice_of
from attnmux.core.choosing.decision import Decision
from attnmux.core.choosing.problem import (
    Problem,
    Variant,
    groups_of,
    opposed,
    verify_lead,
)
from attnmux.core.choosing.requirements import caveats
from attnmux.core.choosing.verdicts import refusal, verdicts
from attnmux.core.facts.derived import (
    group_requests,
    has_separable_trees,
    linear_request,
    parts_request,
    prefixes_request,
    undrafted_request,
)
from attnmux.core.facts.errors import InvalidInput, NoBackend
from attnmux.core.facts.frozen import Deferred, FrozenMapping
from attnmux.core.facts.libraries import Libraries, assumed, installed_version
from attnmux.core.facts.platform import Platform
from attnmux.core.facts.policy import NAMING, Policy
from attnmux.core.facts.questions import Question
from attnmux.core.facts.request import Request
from attnmux.core.facts.sparse import check_decidable
from attnmux.core.facts.values import LINEAR_KINDS, PHASES, OptionValue, shape_said
from attnmux.core.facts.vendors import EXAMPLE
from attnmux.core.facts.verdicts import Coercion, Reason


def solve(
    request: Request,
    platform: Platform,
    offers: Iterable[Offer],
    policy: Policy | None = None,
    *,
    libraries: Libraries | None = None,
    ranking: Ranking = prior_rank,
    accuracy: Accuracy = by_card,
) -> Decision:
    """Choose a backend for each requested phase among the `offers` of the plugins, in any order.

    The answer has the fewest coercions; then the best ranks of decode, extend and encoder, in that
    order; then the fewest backends; then the page size that decode's backend prefers.

    libraries: those that count. None: those of this environment if the platform is here
    (`Platform.is_here`), else all that a card requires.

    Raises NoBackend, with every verdict, where nothing serves the request; UnknownBackend or
    InvalidInput for a name or an option in `policy` that cannot be used, for arguments of other
    types, for two offers with the same address, and where pages are chosen and the dtype is open or
    the page size does not fit the budget.
    """
    policy, offers = Policy() if policy is None else policy, _in_order(offers)
    _check_kinds(request, platform, policy)
    # Of the asker's request: a search tries other page sizes
    check_decidable(request)
    again = partial(solve, offers=offers, libraries=libraries, ranking=ranking, accuracy=accuracy)
    problems = [
        _problem(each, platform, offers, policy, libraries, ranking, accuracy)
        for each in group_requests(request)
    ]
    try:
        decision = _decided(request, problems, libraries or installed_version)
    except NoBackend as refused:
        if request.other_layers or not has_separable_trees(request):
            raise
        try:
            decision = _with_trees(request, platform, policy, again)
        except NoBackend:
            raise refused from None
    if request.linear_layers:
        # Also of trees: who serves these layers without drafts may not serve them with drafts
        decision = _with_linear(decision, policy, again)
    if not request.chunked_prefix or decision.trees or "extend" not in decision.phases:
        return decision
    by_address = {offer.address: offer for offer in offers}

    def rank(one: Decision) -> int:
        asked = Question(
            request=one.request,
            platform=platform,
            phase="extend",
        )
        return ranking(by_address[one.phases["extend"].address], asked).value

    return _with_expanded(decision, partial(again, policy=_unnamed(policy)), rank)


def _decided(request: Request, problems: Sequence[Problem], libraries: Libraries) -> Decision:
    """A decision for each group of layers that are alike, all with one page size and, but for
    groups that have their own, one KV dtype: each phase has a backend whose card admits all of it.

    Raises NoBackend for the first group that nothing serves, and where no page size and KV dtype
    serves all groups.
    """
    variants = [problem.variants() for problem in problems]
    best = best_together(problems, variants)
    if best is None:
        raise _refused(request, problems, variants)
    given = read_options(problems[0].policy.options, problems[0].offers, libraries)
    found = [
        _decision(problem, alike, one, given)
        for problem, alike, one in zip(problems, variants, best, strict=True)
    ]
    return Decision.of_groups(found, request.other_layers)


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
    )


def _with_expanded(
    decision: Decision, again: Callable[..., Decision], rank: Callable[[Decision], int]
) -> Decision:
    """The decision, with a backend for expanded prompts where one ranks as high as the absorbed.

    again: solves for another request. rank: of the backend that serves extend. Only plain MLA has
    expanded prompts: a part of the keys can be merged by LSE, but not a part of a window. Chunks
    depend on the other requests of a step, so that a deterministic request has none.
    """
    request = decision.request
    unmerged = (request.sliding_window, request.attention_chunk, request.custom_mask)
    unfit = request.kind != "mla" or any(unmerged) or request.deterministic
    if unfit or not request.dtype or not request.head_dim:
        return decision
    try:
        found = again(parts_request(request), decision.platform)
    except NoBackend:
        return decision
    if rank(found) > rank(decision):
        return decision
    return replace(decision, expanded=found.phases["extend"])


def _with_linear(decision: Decision, policy: Policy, again: Callable[..., Decision]) -> Decision:
    """The decision, with the backends of each kind of linear layers that one serves.

    again: solves for another request. Raises NoBackend where the named backend serves none of them.
    """
    request, named = decision.request, policy.linear_backend
    asked = replace(_unnamed(policy), backend=named)
    found: dict[str, Mapping[str, Choice]] = {}
    for kind, _ in request.linear_layers:
        if kind not in LINEAR_KINDS:
            continue
        try:
            one = again(linear_request(request, kind), decision.platform, policy=asked)
        except NoBackend:
            if named is not None:
                raise
            continue
        found[kind] = one.phases
    return replace(decision, linear=FrozenMapping(found))


def _unnamed(policy: Policy) -> Policy:
    """The policy for a further backend, which the names of the others do not concern."""
    unset: dict[str, Any] = dict.fromkeys(NAMING)
    return replace(policy, **unset, origins=FrozenMapping())


def _with_trees(
    request: Request, platform: Platform, policy: Policy, again: Callable[..., Decision]
) -> Decision:
    """The decision for draft trees that no backend verifies by itself: one for the request without
    drafts, and a backend that attends to the prefixes.

    again: solves for another request. Verification is told as the work of that backend, and steps
    of a draft model as that of extend's. A backend that is named for verification reads the
    prefixes, or the decision records the change. Raises NoBackend where one of the two is missing.
    """
    found = again(undrafted_request(request), platform, policy=policy)
    names = ("spec_topk", "spec_draft_tokens", "phases")
    given = {name: getattr(request, name) for name in names}
    origins = {name: value for name, value in found.request.origins.items() if name not in names}
    origins.update((name, request.origins[name]) for name in names if name in request.origins)
    asked = replace(found.request, **given, origins=FrozenMapping(origins))
    trees, changes = _prefix_reader(prefixes_request(asked), request, platform, policy, again)
    served = {**found.phases, "verify": trees, "draft": found.phases["extend"]}
    left = (*found.phases, *request.phases)
    return replace(
        found,
        request=asked,
        phases=FrozenMapping({phase: served[phase] for phase in PHASES if phase in left}),
        trees=trees,
        coercions=(*found.coercions, *changes),
    )


def _prefix_reader(
    prefixes: Request,
    request: Request,
    platform: Platform,
    policy: Policy,
    again: Callable[..., Decision],
) -> tuple[Choice, tuple[Coercion, ...]]:
    """The backend that reads the prefixes of trees: the one that is named for verification where
    it can, else the best, with the change that this is.

    prefixes: `prefixes_request` of the decided request. again: solves for another request.
    """
    named = policy.named_for(verify_lead(request)) if "verify" in request.phases else None
    if named is None:
        return again(prefixes, platform, policy=_unnamed(policy)).phases["decode"], ()
    field, name = named
    origin = policy.origins.get(field, "user")
    kept = replace(_unnamed(policy), decode_backend=name, origins={"decode_backend": origin})
    try:
        return again(prefixes, platform, policy=kept).phases["decode"], ()
    except NoBackend:
        trees = again(prefixes, platform, policy=_unnamed(policy)).phases["decode"]
    change = Coercion(
        field="backend for verify",
        old=name,
        new=trees.backend,
        because=f"{name} has no draft trees, and does not read their prefixes with LSE",
        origin=origin,
    )
    return trees, (change,)


def _check_kinds(request: object, platform: object, policy: object) -> None:
    """Raise InvalidInput for texts and mappings in the place of what is made of them."""
    for name, given, kind, such_as in (
        ("request", request, Request, 'Request.parse("dtype=bf16,page_size=16")'),
        ("platform", platform, Platform, f'Platform.parse("{EXAMPLE}")'),
        ("policy", policy, Policy, "Policy(backend=NAME)"),
    ):
        if not isinstance(given, kind):
            expected = f"a {kind.__name__}, such as {such_as}"
            raise InvalidInput(name, got=f"one of type {type(given).__name__}", expected=expected)


def _in_order(given: object) -> tuple[Offer, ...]:
    """By address, whatever the order of the plugins."""
    offers = []
    for offer in given if isinstance(given, Iterable) else (given,):
        if not isinstance(offer, Offer):
            got = f"one of type {type(offer).__name__}"
            expected = "offers, each a card with its plugin, as load_plugins().offers() are"
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
        choice = choice_of(offer, given.get(offer.address, {}), origin)
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
            for offer in dict.fromkeys(best.winners)
            for note in caveats(offer.card, problem.platform, problem.libraries)
        ),
        candidates=Deferred(partial(verdicts, problem, variants, best)),
        is_checked=True,
    )
