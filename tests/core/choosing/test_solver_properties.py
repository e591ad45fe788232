"""What holds for every set of cards and every request."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnmux.core import Decision, LayerGroup, NoBackend, Offer, Platform, Policy, Request, solve
from attnmux.core.cards.clause import ALWAYS
from attnmux.core.facts.errors import UnknownBackend
from attnmux.core.facts.request import parse_fields
from attnmux.core.facts.values import DTYPES
from attnmux.core.facts.verdicts import Verdict
from attnmux.core.plugin import (
    ANY,
    NONE,
    BackendCard,
    Clause,
    Prior,
    anything_but,
    at_most,
    emulated,
    multiple_of,
    one_of,
)
from attnmux.core.verbs import check

CPU = Platform.parse("cpu:x86_64")
PHASES = ("extend", "decode", "verify", "draft", "encoder")
STORED = ("bfloat16", "float16", "fp8_e4m3")
NAMES = ("c0", "c1", "c2", "c3", "c4")

# So that many questions have an answer: the rest say little of what follows once backends fit
rarely = st.sampled_from([False, False, False, True])
feature = st.sampled_from([ANY, ANY, ANY, NONE])
usual = st.sampled_from([PHASES, PHASES, ("extend", "decode"), ("decode",), ("extend",)])
clauses = st.builds(
    Clause,
    vendor=st.sampled_from([ANY, ANY, ANY, ANY, one_of("nvidia"), one_of("cpu")]),
    phase=st.one_of(
        usual, st.lists(st.sampled_from(PHASES), min_size=1, max_size=3, unique=True)
    ).map(lambda phases: one_of(*phases)),
    kind=st.sampled_from([one_of("mha"), one_of("mha", "mla"), one_of("mha", "mla")]),
    dtype=st.sampled_from([ANY, one_of("bfloat16"), one_of("float16", "bfloat16")]),
    kv_dtype=st.one_of(
        st.lists(st.sampled_from(STORED), min_size=1, unique=True).map(lambda d: one_of(*d)),
        st.sampled_from([ANY, anything_but("bfloat16")]),
    ),
    page_size=st.one_of(
        st.sampled_from([ANY, emulated(1), anything_but(1), anything_but(16, 48)]),
        st.sampled_from([one_of(1), one_of(64), one_of(32, 64), multiple_of(16), multiple_of(24)]),
    ),
    head_dim=st.just(ANY),
    spec_topk=st.sampled_from([ANY, NONE, at_most(1)]),
    sliding_window=feature,
    sinks=feature,
    deterministic=feature,
    graph=feature,
    lse=feature,
)
priors = st.builds(
    Prior,
    rank=st.integers(1, 3),
    when=st.sampled_from(
        [ALWAYS, Clause.when(phase=one_of("decode")), Clause.when(phase=one_of("extend"))]
    ),
    source=st.just("x"),
)
cards = st.builds(
    lambda found, priors, excludes: BackendCard(
        name="card",
        summary="",
        factory="a:b",
        clauses=tuple(found),
        priors=tuple(priors),
        excludes=tuple(excludes),
    ),
    st.lists(clauses, min_size=1, max_size=3),
    st.lists(priors, max_size=2),
    st.lists(st.sampled_from(NAMES), max_size=3),
)
offers = st.lists(cards, min_size=1, max_size=5).map(
    lambda found: [
        Offer(card=replace(card, name=name), plugin=f"p{name}")
        for name, card in zip(NAMES, found, strict=False)
    ]
)
requests = st.builds(
    Request,
    kind=st.sampled_from(["mha", "mha", "mha", "mla"]),
    dtype=st.sampled_from([None, "bfloat16", "float16"]),
    kv_dtype=st.sampled_from([None, None, *STORED]),
    page_size=st.sampled_from([None, None, 1, 16, 48, 64]),
    spec_topk=st.sampled_from([None, None, 1, 4]),
    sliding_window=st.sampled_from([None, None, None, 127]),
    sinks=rarely,
    deterministic=rarely,
    graph=rarely,
    lse=rarely,
    multimodal=rarely,
    speculative_attention_mode=st.sampled_from(["prefill", "decode"]),
)
policies = st.builds(Policy, allow_coercion=st.booleans())


def outcome(request, found, policy) -> Decision | tuple:
    try:
        return solve(request, CPU, found, policy)
    except NoBackend as refusal:
        return refusal.candidates


@given(requests, offers, policies, st.randoms())
def test_the_order_of_the_cards_does_not_matter(request, found, policy, random) -> None:
    shuffled = list(found)
    random.shuffle(shuffled)
    assert outcome(request, found, policy) == outcome(request, shuffled, policy)


@given(requests, offers, policies)
def test_a_card_that_cannot_serve_changes_nothing(request, found, policy) -> None:
    clause = replace(found[0].card.clauses[0], vendor=one_of("nobody"))
    useless = BackendCard(
        name="useless",
        summary="",
        factory="a:b",
        clauses=(clause,),
        priors=(Prior(rank=0, source="x"),),
        excludes=NAMES,
    )
    before = outcome(request, found, policy)
    after = outcome(request, [*found, Offer(card=useless, plugin="a")], policy)
    assert isinstance(after, Decision) == isinstance(before, Decision)
    verdicts = after.candidates if isinstance(after, Decision) else after
    others = tuple(verdict for verdict in verdicts if verdict.backend != "useless")
    if isinstance(after, Decision):
        assert replace(after, candidates=others) == before
        assert after.hash == before.hash
    else:
        assert others == before


@given(requests, offers, policies)
def test_chosen_backends_serve_and_rejected_ones_have_reasons(request, found, policy) -> None:
    decided = outcome(request, found, policy)
    candidates = decided.candidates if isinstance(decided, Decision) else decided
    assert len(candidates) == len(found) * len(request.phases)
    for verdict in candidates:
        assert (verdict.rank is None) == (verdict.verdict == "rejected")
        assert bool(verdict.reasons) == (verdict.verdict != "fits")
    if isinstance(decided, Decision):
        by_plugin = {offer.plugin: offer.card for offer in found}
        assert tuple(decided.phases) == request.phases
        for phase, choice in decided.phases.items():
            card = by_plugin[choice.plugin]
            assert check(card, phase, decided.request, CPU).verdict == "fits"
        told = {(verdict.plugin, verdict.phase): verdict for verdict in candidates}
        winners = {(choice.plugin, phase) for phase, choice in decided.phases.items()}
        assert all(told[winner].verdict != "rejected" for winner in winners)
        assert Decision.from_json(decided.to_json()) == decided


@given(requests, offers)
def test_nothing_that_the_user_set_is_changed_without_leave(request, found) -> None:
    decided = outcome(request, found, Policy())
    if isinstance(decided, Decision):
        for name, origin in request.origins.items():
            if origin == "user":
                assert getattr(decided.request, name) == getattr(request, name)
        assert not decided.coercions


@given(requests, cards, st.sampled_from(PHASES))
def test_hints_tell_the_truth(request, card, phase) -> None:
    verdict = check(card, phase, request, CPU)
    hints = [reason.hint for reason in verdict.reasons]
    assert all(hints) or not any(hints)
    if hints and all(hints):
        changed = request.replace(**parse_fields(",".join(hints)))
        assert check(card, phase, changed, CPU).verdict == "fits"


FLAGS = {"extend": "prefill_backend", "decode": "decode_backend", "encoder": "mm_backend"}
LEADS = {"backend": ("extend", "decode"), "prefill_backend": ("extend",)}
LEADS |= {"decode_backend": ("decode",), "mm_backend": ("encoder",)}
names = st.dictionaries(st.sampled_from(sorted(LEADS)), st.sampled_from(NAMES))


def following(request: Request, verdict: Verdict) -> dict[str, str]:
    """What the hints of a verdict say to change; empty where it has none."""
    return parse_fields(",".join(reason.hint for reason in verdict.reasons))


def named_for(request: Request, verdict: Verdict, policy: Policy) -> Policy:
    """The policy with the verdict's backend named for its phase."""
    leader = "decode" if request.speculative_attention_mode == "decode" else "extend"
    lead = leader if verdict.phase in ("verify", "draft") else verdict.phase
    return replace(policy, **{FLAGS[lead]: f"{verdict.plugin}/{verdict.backend}"})


def leads_on(request, found, policy, changed: frozenset[str] = frozenset()) -> bool:
    """Whether hints lead to a decision without one field being changed twice."""
    decided = outcome(request, found, policy)
    if isinstance(decided, Decision):
        return True
    ways = [(verdict, following(request, verdict)) for verdict in decided]
    return any(
        leads_on(
            request.replace(**way),
            found,
            named_for(request, verdict, policy),
            changed | way.keys(),
        )
        for verdict, way in ways
        if way and changed.isdisjoint(way)
    )


@given(requests, offers, names)
def test_hints_hold_for_the_whole_question(request, found, given) -> None:
    """Of pairs and named backends too: whoever follows them comes to a decision with the backend
    that was meant, if need be by way of hints for the others."""
    if not {offer.card.name for offer in found}.issuperset(given.values()):
        return
    policy = Policy(**given)
    decided = outcome(request, found, policy)
    for verdict in decided.candidates if isinstance(decided, Decision) else decided:
        hints = [reason.hint for reason in verdict.reasons]
        assert all(hints) or not any(hints)
        way = following(request, verdict)
        if way:
            named = named_for(request, verdict, policy)
            assert leads_on(request.replace(**way), found, named, frozenset(way))


@given(requests, offers, names)
def test_a_hint_that_helps_is_given(request, found, given) -> None:
    """Where a backend alone would fit after a change, and all others are served beside it."""
    if not {offer.card.name for offer in found}.issuperset(given.values()):
        return
    policy = Policy(**given)
    decided = outcome(request, found, policy)
    by_plugin = {offer.plugin: offer.card for offer in found}
    for verdict in decided.candidates if isinstance(decided, Decision) else decided:
        alone = check(by_plugin[verdict.plugin], verdict.phase, request, CPU)
        way = following(request, alone)
        if way and verdict.reasons:
            named = named_for(request, verdict, policy)
            helped = outcome(request.replace(**way), found, named)
            assert bool(following(request, verdict)) or not isinstance(helped, Decision)


RELAXED = {
    "dtype": None,
    "page_size": None,
    "spec_topk": None,
    "sliding_window": None,
    "sinks": False,
    "deterministic": False,
    "graph": False,
    "lse": False,
    "multimodal": False,
}
"""Not kv_dtype: where it is unset, it follows dtype, which may ask for another."""


@given(requests, offers, st.sets(st.sampled_from(sorted(RELAXED)), min_size=1))
def test_asking_for_less_never_removes_a_candidate(request, found, fields) -> None:
    relaxed = request.replace(**{field: RELAXED[field] for field in fields})
    before, after = (outcome(asked, found, Policy()) for asked in (request, relaxed))
    for phase in relaxed.phases:
        for offer in found:
            if check(offer.card, phase, request, CPU).verdict == "fits":
                assert check(offer.card, phase, relaxed, CPU).verdict == "fits"
    if isinstance(before, Decision):
        assert isinstance(after, Decision)
        told = {(verdict.plugin, verdict.phase): verdict.verdict for verdict in after.candidates}
        for verdict in before.candidates:
            if verdict.phase in relaxed.phases and verdict.verdict == "fits":
                assert told[verdict.plugin, verdict.phase] == "fits"


@given(
    requests,
    offers,
    st.dictionaries(st.sampled_from(sorted(LEADS)), st.sampled_from(NAMES), min_size=1),
    st.booleans(),
)
def test_an_explicit_name_is_kept_or_is_an_error(request, found, given, coercing) -> None:
    policy = Policy(**given, allow_coercion=coercing, prefer=("c0",))
    installed = {offer.card.name for offer in found}
    if not installed.issuperset(given.values()):
        with pytest.raises(UnknownBackend):
            solve(request, CPU, found, policy)
        return
    decided = outcome(request, found, policy)
    if isinstance(decided, Decision):
        for phase in set(request.phases) & {"extend", "decode", "encoder"}:
            named = policy.named_for(phase)
            assert named is None or decided.phases[phase].backend == named[1]


@given(requests, offers, policies)
def test_a_base_name_is_the_same_name_for_both_phases(request, found, policy) -> None:
    together = replace(policy, backend="c0")
    apart = replace(policy, prefill_backend="c0", decode_backend="c0")
    one, other = (outcome(request, found, spelled) for spelled in (together, apart))
    assert one == other
    if isinstance(one, Decision):
        assert one.hash == other.hash
        assert one.to_json() == other.to_json()


@given(requests, offers, st.sampled_from(STORED), st.booleans())
def test_groups_are_the_best_there_are_at_a_shared_page_size(request, found, own, keeps) -> None:
    """Against trying every page size: each group alone at it, and with its own KV dtype."""
    request = request.replace(kind="mha", spec_topk=None, multimodal=False, dtype="bfloat16")
    found = [replace(one, card=replace(one.card, excludes=())) for one in found]
    group = LayerGroup(layers=1, kv_dtype=own if keeps else None)
    decided = outcome(request.replace(other_layers=[group]), found, Policy())
    kept = request.replace(origin="model", kv_dtype=own) if keeps else request
    # Without these, as the group has none of its own
    kept = kept.replace(origin="model", sliding_window=None, sinks=False)
    pages = [request.page_size] if request.page_size else (1, 2, 16, 24, 32, 48, 64, 96, 192)
    best = None
    for page_size in pages:
        each = [
            outcome(one.replace(page_size=page_size), found, Policy()) for one in (request, kept)
        ]
        if all(isinstance(one, Decision) for one in each):
            merits = tuple(map(merits_of, each))
            best = merits if best is None else min(best, merits)
    assert isinstance(decided, Decision) == (best is not None)
    if isinstance(decided, Decision):
        stored = [each.kv_dtype for each in decided.groups]
        first = request.kv_dtype or "bfloat16"
        assert stored == [first, own if keeps else first]
        assert len({each.page_size for each in decided.groups}) == 1
        assert tuple(map(merits_of, decided.groups)) == best


def merits_of(decided: Decision) -> tuple[int, ...]:
    """The ranks of the winners, decode's first."""
    ranks = {(one.plugin, one.phase): one.rank for one in decided.candidates}
    chosen = decided.phases
    order = [phase for phase in ("decode", "extend") if phase in chosen]
    return tuple(ranks[chosen[phase].plugin, phase] for phase in order)


def excluding(one, other) -> bool:
    said = one.card.name in other.card.excludes or other.card.name in one.card.excludes
    return one is not other and said


@given(requests, offers)
def test_the_choice_is_the_best_there_is(request, found) -> None:
    """Against trying every pair of backends at every page size and KV dtype."""
    request = request.replace(spec_topk=None, multimodal=False)
    decided = outcome(request, found, Policy())
    pages = [request.page_size] if request.page_size else (1, 2, 16, 24, 32, 48, 64, 96, 192)
    stored = [request.kv_dtype or request.dtype] if request.kv_dtype or request.dtype else DTYPES
    best = None
    for page_size in pages:
        for kv_dtype in stored:
            resolved = request.replace(page_size=page_size, kv_dtype=kv_dtype)
            fitting = [
                [
                    (verdict.rank, offer)
                    for offer in found
                    if (verdict := check(offer.card, phase, resolved, CPU)).rank is not None
                ]
                for phase in ("decode", "extend")
            ]
            for (decode, one), (extend, other) in product(*fitting):
                if not excluding(one, other):
                    best = (decode, extend) if best is None else min(best, (decode, extend))
    assert isinstance(decided, Decision) == (best is not None)
    if isinstance(decided, Decision):
        cards_by_plugin = {offer.plugin: offer.card for offer in found}
        assert best == tuple(
            check(cards_by_plugin[decided.phases[phase].plugin], phase, decided.request, CPU).rank
            for phase in ("decode", "extend")
        )
