"""What is told of a decision: who won and why, who did not and why not."""

from __future__ import annotations

from pathlib import Path

import pytest

from attnmux.configs import request_from_model
from attnmux.core import Decision, NoBackend, Platform, Plugins, Policy, Request, solve
from attnmux.core.cli.outcomes import (
    Outcome,
    joined_by_first_reason,
    outcomes,
    outcomes_of_refusal,
)
from attnmux.core.facts.request import parse_fields
from attnmux.core.plugin import ANY, NONE, Clause, Prior, one_of

DATA = Path(__file__).parents[1] / "data"


@pytest.fixture
def tell(cpu):
    """(the decision, its outcomes) of a request's text over some cards."""

    def told(text: str, cards, **policy: object) -> tuple[Decision, tuple[Outcome, ...]]:
        said = Policy(**policy)
        decision = solve(Request.parse(text), cpu, cards, said, libraries={}.get)
        return decision, outcomes(decision, cards, said)

    return told


def one(told, backend: str, phase: str | None = None) -> Outcome:
    (found,) = [each for each in told if each.backend == backend and phase in (None, *each.phases)]
    return found


def test_the_winner_and_the_others(tell, offer) -> None:
    _, told = tell("dtype=bf16", [offer("b", rank=20), offer("a", rank=10)])
    assert [each.backend for each in told] == ["a", "b"]
    assert told[0].standing == "chosen"
    assert told[0].phases == ("extend", "decode")
    assert told[0].why == "best rank of 2 that fit"
    assert told[0].source == "the test"
    assert (told[1].standing, told[1].why) == ("fits", "fits, ranked after a")


def test_a_backend_that_fits_only_at_another_page_size(tell, offer) -> None:
    cards = [
        offer("a", rank=10, phase=one_of("decode"), page_size=one_of(64)),
        offer("b", rank=20, phase=one_of("extend"), page_size=one_of(16, 64)),
        offer("c", rank=5, phase=one_of("extend"), page_size=one_of(16)),
    ]
    decision, told = tell("dtype=bf16", cards)
    assert decision.page_size == 64
    loser = one(told, "c", "extend")
    assert loser.standing == "elsewhere"
    assert loser.why == "fits alone, but not at the decided page size 64"
    (reason,) = loser.reasons
    assert (reason.code, reason.wanted, reason.hint) == ("PAGE_SIZE", "64", "page_size=16")
    assert one(told, "b", "extend").why == (
        "the only one that fits with page size 64, KV in bfloat16"
    )


def test_a_backend_that_fits_only_with_another_kv_dtype(tell, offer) -> None:
    cards = [
        offer("a", rank=10, kv_dtype=one_of("fp8_e4m3")),
        offer("b", rank=20, kv_dtype=one_of("bfloat16")),
    ]
    decision, told = tell("", cards)
    assert decision.kv_dtype == "fp8_e4m3"
    assert one(told, "b").why == "fits alone, but not at the decided KV in fp8_e4m3"


def test_the_decided_point_counts_in_every_phase_of_a_group(tell, offer, clause) -> None:
    """Verify runs on the backend of extend: what fails there at the page size fails for both."""
    served = one_of("extend", "decode", "verify", "draft")
    tree = {"phase": served, "spec_topk": ANY}
    half = (
        clause(phase=one_of("extend", "draft"), spec_topk=ANY),
        clause(phase=one_of("verify"), spec_topk=ANY, page_size=one_of(1)),
    )
    cards = [offer("a", rank=10, page_size=one_of(16), **tree), offer("b", rank=20, clauses=half)]
    decision, told = tell("dtype=bf16,spec_topk=4", cards)
    assert decision.page_size == 16
    assert one(told, "b", "extend").why == (
        "fits alone, but not for verify at the decided page size 16"
    )
    assert one(told, "b", "verify").why == "fits alone, but not at the decided page size 16"


def test_named_backends(tell, offer) -> None:
    cards = [offer("a", rank=10), offer("b", rank=20)]
    _, told = tell("dtype=bf16", cards, decode_backend="b", origins={"decode_backend": "env"})
    assert one(told, "b", "decode").why == "named by env: decode_backend=b"
    assert one(told, "a", "decode").why == "fits, but b was named"
    assert one(told, "a", "extend").why == "best rank of 2 that fit"


def test_preferred_backends(tell, offer) -> None:
    cards = [offer("a", rank=10), offer("b", rank=20)]
    _, told = tell("dtype=bf16", cards, prefer=("fake/b",))
    assert one(told, "b").why == "preferred, of 2 that fit"
    assert one(told, "a").why == "fits, but b is preferred"


def test_a_companion_says_for_whom(tell, offer) -> None:
    half = offer("half", rank=10, phase=one_of("decode"), companions=("whole",))
    cards = [half, offer("whole", rank=20), offer("other", rank=5)]
    _, told = tell("dtype=bf16", cards, backend="half")
    assert [(each.backend, each.phases) for each in told[:2]] == [
        ("whole", ("extend",)),
        ("half", ("decode",)),
    ]
    assert told[0].why == "stands in for half, which does not serve extend"
    assert one(told, "other", "extend").why == "fits, but whole stands in for half"


def test_ties_and_the_only_one(tell, offer) -> None:
    _, told = tell("dtype=bf16", [offer("a", rank=10), offer("b", rank=10)])
    assert one(told, "b").why == "fits, level with a: fewer backends win, then names"
    _, told = tell("dtype=bf16", [offer("a")])
    assert one(told, "a").why == "the only one that fits"
    assert one(told, "a").source == ""


def test_the_source_is_that_of_the_rank_that_counted(tell, offer) -> None:
    priors = (
        Prior(rank=10, when=Clause.when(page_size=one_of(1)), source="small pages"),
        Prior(rank=20, source="otherwise"),
    )
    _, told = tell("page_size=16", [offer("a", priors=priors)])
    assert one(told, "a").source == "otherwise"


def test_all_reasons_are_kept_and_the_nearest_comes_first(tell, offer) -> None:
    cards = [
        offer("far", vendor=one_of("elsewhere"), phase=one_of("extend"), page_size=one_of(64)),
        offer("fits"),
        offer("near", page_size=one_of(64)),
    ]
    _, told = tell("page_size=16", cards)
    assert [each.backend for each in told] == ["fits", "near", "far", "far"]
    far = one(told, "far", "decode")
    assert [reason.code for reason in far.reasons] == ["VENDOR", "PHASE", "PAGE_SIZE"]
    short = joined_by_first_reason(told)
    assert one(short, "far").phases == ("extend", "decode")
    assert len(one(short, "far").reasons) == 3


def test_a_backend_that_fits_only_after_a_change(offer, cpu) -> None:
    """The page size is the model's, so that it may be changed, and need not be."""
    cards = [offer("a", page_size=one_of(16)), offer("b", page_size=one_of(64))]
    decision = solve(Request.parse("page_size=16", origin="model"), cpu, cards)
    loser = one(outcomes(decision, cards, Policy()), "b")
    assert (loser.standing, loser.why) == ("coerced", "not as asked")
    assert loser.reasons[0].hint == "page_size=64"


def test_a_card_that_is_gone_leaves_its_verdict(tell, offer) -> None:
    decision, _ = tell("dtype=bf16", [offer("a", rank=10), offer("b", rank=20, lse=NONE)])
    again = Decision.from_json(decision.to_json())
    told = outcomes(again, (), Policy())
    assert [(each.backend, each.standing) for each in told] == [("a", "chosen"), ("b", "fits")]


def test_a_refusal(offer, cpu) -> None:
    cards = [offer("a", phase=one_of("extend")), offer("b", graph=NONE, vendor=one_of("else"))]
    request = Request.parse("dtype=bf16")
    with pytest.raises(NoBackend) as caught:
        solve(request, cpu, cards)
    told = outcomes_of_refusal(request, cpu, caught.value.candidates, cards, Policy())
    assert one(told, "a", "extend").why == "fits, but nothing serves decode"
    assert [reason.code for reason in one(told, "a", "decode").reasons] == ["PHASE"]
    assert {each.standing for each in told if each.backend == "b"} == {"rejected"}


def test_a_refusal_tells_of_the_named_first(offer, cpu) -> None:
    cards = [
        offer("fits"),
        offer("half", phase=one_of("decode"), aliases=("asked",)),
        offer("small", page_size=one_of(8)),
    ]
    request, policy = Request.parse("page_size=16"), Policy(prefill_backend="asked")
    with pytest.raises(NoBackend) as caught:
        solve(request, cpu, cards, policy)
    told = outcomes_of_refusal(request, cpu, caught.value.candidates, cards, policy)
    assert [(each.backend, each.phases) for each in told[:2]] == [
        ("half", ("extend",)),
        ("fits", ("extend",)),
    ]


def test_a_backend_that_the_winner_excludes(tell, offer) -> None:
    """The extend half wins by rank where decode's winner is another's enemy."""
    cards = [
        offer("decoder", rank=10, phase=one_of("decode"), excludes=("enemy",)),
        offer("enemy", rank=10, phase=one_of("extend")),
        offer("friend", rank=20),
    ]
    _, told = tell("dtype=bf16", cards)
    loser = one(told, "enemy", "extend")
    assert loser.standing == "elsewhere"
    assert loser.why == "fits alone, but not with what was decided"
    assert [reason.code for reason in loser.reasons] == ["EXCLUDED"]
    assert one(told, "friend", "extend").standing == "chosen"


FIELDS = {"extend": "prefill_backend", "decode": "decode_backend", "encoder": "mm_backend"}
MACHINES = ("nvidia:sm90,cuda=12.8", "nvidia:sm100,cuda=12.8", "amd:gfx942,rocm=6.4")
ASKED = (
    "dtype=bf16",
    "page_size=64",
    "spec_topk=4,spec_draft_tokens=8",
    "spec_topk=1,spec_draft_tokens=4,speculative_attention_mode=decode",
    "kv_dtype=fp8_e4m3",
)


@pytest.mark.parametrize(
    ("model", "machine", "asked"),
    [
        # Each pair of any two of them
        pytest.param(model, machine, asked, marks=[pytest.mark.full] * bool((x + y + z) % 3))
        for x, model in enumerate(["llama-3.1-8b", "deepseek-v3", "gpt-oss-20b"])
        for y, machine in enumerate(MACHINES)
        for z, asked in enumerate(ASKED)
    ],
)
def test_an_outcome_agrees_with_naming_the_backend(model, machine, asked) -> None:
    """At the decided page size and KV dtype, what "fits" can be named, and nothing else can.

    A backend that verifies draft trees only by merging two parts does not fit where others do so by
    themselves.
    """
    pytest.importorskip("attnmux.cpu.plugin")
    offers = Plugins.load().offers()
    platform = Platform.parse(machine)
    policy = Policy()
    request = request_from_model(DATA / model).replace(**parse_fields(asked))
    decision = solve(request, platform, offers, policy)
    pinned = decision.request.replace(page_size=decision.page_size, kv_dtype=decision.kv_dtype)
    others = {
        FIELDS[phase]: f"{choice.plugin}/{choice.backend}"
        for phase, choice in decision.phases.items()
        if phase in FIELDS
    }
    for outcome in outcomes(decision, offers, policy):
        for phase in FIELDS.keys() & set(outcome.phases):
            named = {**others, FIELDS[phase]: f"{outcome.plugin}/{outcome.backend}"}
            came_to = _chosen(pinned, platform, offers, named)
            can_be_named = (
                came_to is not None
                and (came_to.answer("draft_trees", "prefixes", "decode") is None)
                == (decision.answer("draft_trees", "prefixes", "decode") is None)
                and came_to.phases[phase].address == f"{outcome.plugin}/{outcome.backend}"
            )
            assert can_be_named == (outcome.standing in ("chosen", "fits")), outcome


def _chosen(request, platform, offers, named) -> Decision | None:
    """A name can mean another card of the family, which fits."""
    try:
        return solve(request, platform, offers, Policy(**named))
    except NoBackend:
        return None
