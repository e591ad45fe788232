"""What holds for every set of cards and every request."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from attnmux.core.choosing.card import BackendCard, Clause, Offer, Prior
from attnmux.core.choosing.checking import check
from attnmux.core.choosing.conditions import ANY, NONE, at_most, emulated, multiple_of, one_of
from attnmux.core.choosing.decision import Decision
from attnmux.core.choosing.platform import Platform
from attnmux.core.choosing.request import Request, parse_fields
from attnmux.core.choosing.solver import Policy, solve
from attnmux.core.errors import NoBackend

CPU = Platform.parse("cpu:x86_64")
PHASES = ("extend", "decode", "verify", "draft", "encoder")
STORED = ("bfloat16", "float16", "fp8_e4m3")

feature = st.sampled_from([ANY, ANY, NONE])
clauses = st.builds(
    Clause,
    vendor=st.sampled_from([ANY, ANY, ANY, one_of("nvidia"), one_of("cpu")]),
    phase=st.lists(st.sampled_from(PHASES), min_size=1, unique=True).map(lambda p: one_of(*p)),
    kind=st.sampled_from([one_of("mha"), one_of("mha", "mla")]),
    dtype=st.sampled_from([ANY, one_of("bfloat16"), one_of("float16", "bfloat16")]),
    kv_dtype=st.lists(st.sampled_from(STORED), min_size=1, unique=True).map(lambda d: one_of(*d)),
    page_size=st.sampled_from(
        [ANY, emulated(1), one_of(1), one_of(64), one_of(32, 64), multiple_of(16), multiple_of(24)]
    ),
    head_dim=st.just(ANY),
    spec_topk=st.sampled_from([ANY, NONE, at_most(1)]),
    sliding_window=feature,
    sinks=feature,
    deterministic=feature,
    graph=feature,
    lse=feature,
)
cards = st.builds(
    lambda found, rank: BackendCard(
        name="card",
        summary="",
        factory="a:b",
        clauses=tuple(found),
        priors=() if rank is None else (Prior(rank=rank, source="x"),),
    ),
    st.lists(clauses, min_size=1, max_size=3),
    st.sampled_from([None, 1, 2]),
)
offers = st.lists(cards, min_size=1, max_size=5).map(
    lambda found: [Offer(card=card, plugin=f"p{place}") for place, card in enumerate(found)]
)
requests = st.builds(
    Request,
    kind=st.sampled_from(["mha", "mha", "mla"]),
    dtype=st.sampled_from([None, "bfloat16", "float16"]),
    kv_dtype=st.sampled_from([None, None, *STORED]),
    page_size=st.sampled_from([None, None, 1, 16, 48, 64]),
    spec_topk=st.sampled_from([None, None, 1, 4]),
    sliding_window=st.sampled_from([None, 127]),
    sinks=st.booleans(),
    deterministic=st.booleans(),
    graph=st.booleans(),
    lse=st.booleans(),
    multimodal=st.booleans(),
    speculative_attention_mode=st.sampled_from(["prefill", "decode"]),
)
policies = st.builds(Policy, allow_coercion=st.booleans())


def outcome(request, found, policy) -> Decision | tuple:
    try:
        return solve(request, CPU, found, policy)
    except NoBackend as refusal:
        return refusal.candidates


@settings(deadline=None)
@given(requests, offers, policies, st.randoms())
def test_the_order_of_the_cards_does_not_matter(request, found, policy, random) -> None:
    shuffled = list(found)
    random.shuffle(shuffled)
    assert outcome(request, found, policy) == outcome(request, shuffled, policy)


@settings(deadline=None)
@given(requests, offers, policies)
def test_a_card_that_cannot_serve_changes_nothing(request, found, policy) -> None:
    clause = replace(found[0].card.clauses[0], vendor=one_of("nobody"))
    useless = BackendCard(
        name="useless",
        summary="",
        factory="a:b",
        clauses=(clause,),
        priors=(Prior(rank=0, source="x"),),
    )
    before = outcome(request, found, policy)
    after = outcome(request, [*found, Offer(card=useless, plugin="a")], policy)
    if isinstance(before, Decision):
        assert (after.phases, after.request, after.hash) == (
            before.phases,
            before.request,
            before.hash,
        )
    else:
        assert not isinstance(after, Decision)


@settings(deadline=None)
@given(requests, offers, policies)
def test_what_is_chosen_serves_and_what_is_rejected_says_why(request, found, policy) -> None:
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
        assert Decision.from_json(decided.to_json()) == decided


@settings(deadline=None)
@given(requests, offers)
def test_nothing_that_the_user_set_is_changed_without_leave(request, found) -> None:
    decided = outcome(request, found, Policy())
    if isinstance(decided, Decision):
        for name, origin in request.origins.items():
            if origin == "user":
                assert getattr(decided.request, name) == getattr(request, name)
        assert not decided.coercions


@settings(max_examples=300, deadline=None)
@given(requests, cards, st.sampled_from(PHASES))
def test_hints_tell_the_truth(request, card, phase) -> None:
    verdict = check(card, phase, request, CPU)
    hints = [reason.hint for reason in verdict.reasons if reason.hint]
    if not hints:
        return
    changed = request.replace(**parse_fields(",".join(hints)))
    after = check(card, phase, changed, CPU)
    if len(hints) == len(verdict.reasons):
        assert after.verdict == "fits"
    else:
        assert len(after.reasons) < len(verdict.reasons)


@settings(deadline=None)
@given(requests, offers, policies)
def test_asking_for_less_never_removes_a_candidate(request, found, policy) -> None:
    relaxed = request.replace(sinks=False, lse=False, page_size=None, sliding_window=None)
    if isinstance(outcome(request, found, policy), Decision):
        assert isinstance(outcome(relaxed, found, policy), Decision)


@settings(deadline=None)
@given(requests, offers)
def test_the_choice_is_the_best_there_is(request, found) -> None:
    """Against trying every pair of backends at every page size and KV dtype."""
    request = request.replace(spec_topk=None, multimodal=False)
    decided = outcome(request, found, Policy())
    pages = [request.page_size] if request.page_size else (1, 16, 24, 32, 48, 64, 192)
    stored = [request.kv_dtype or request.dtype] if request.kv_dtype or request.dtype else STORED
    best = None
    for page_size in pages:
        for kv_dtype in stored:
            resolved = request.replace(page_size=page_size, kv_dtype=kv_dtype)
            ranks = [
                [
                    verdict.rank
                    for offer in found
                    if (verdict := check(offer.card, phase, resolved, CPU)).rank is not None
                ]
                for phase in ("decode", "extend")
            ]
            if all(ranks):
                merit = (min(ranks[0]), min(ranks[1]))
                best = merit if best is None else min(best, merit)
    assert isinstance(decided, Decision) == (best is not None)
    if isinstance(decided, Decision):
        cards_by_plugin = {offer.plugin: offer.card for offer in found}
        assert best == tuple(
            check(cards_by_plugin[decided.phases[phase].plugin], phase, decided.request, CPU).rank
            for phase in ("decode", "extend")
        )
