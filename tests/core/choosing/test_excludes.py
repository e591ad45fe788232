from __future__ import annotations

from itertools import product

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attnmux.core import InvalidInput, NoBackend, Policy, Request, solve
from attnmux.core.plugin import ANY, at_most, one_of

ALL = one_of("extend", "decode", "verify", "draft", "encoder")


def chosen(decision) -> dict[str, str]:
    return {phase: choice.backend for phase, choice in decision.phases.items()}


def said(candidates) -> dict[tuple[str, str], tuple[str, ...]]:
    return {(v.backend, v.phase): tuple(r.code for r in v.reasons) for v in candidates}


@pytest.mark.parametrize("name", ["gen", "fake/gen", "gen_alias", "fake/gen_alias"])
@pytest.mark.parametrize("by_decode", [False, True])
def test_two_that_exclude_each_other_are_not_taken_together(offer, cpu, name, by_decode) -> None:
    rule = {"excludes": ("pre" if by_decode else name,)}
    cards = [
        offer("pre", rank=1, phase=one_of("extend"), **({} if by_decode else rule)),
        offer(
            "gen",
            rank=1,
            phase=one_of("decode"),
            aliases=("gen_alias",),
            **(rule if by_decode else {}),
        ),
        offer("both", rank=5),
    ]
    # Decode's rank outweighs extend's
    assert chosen(solve(Request(), cpu, cards)) == {"extend": "both", "decode": "gen"}
    named = solve(Request(), cpu, cards, Policy(prefill_backend="pre"))
    assert chosen(named) == {"extend": "pre", "decode": "both"}


def test_several_backends_can_be_skipped_for_the_next_best(offer, cpu) -> None:
    others = [offer(f"gen{rank}", rank=rank, phase=one_of("decode")) for rank in range(1, 6)]
    excluded = tuple(found.card.name for found in others[:4])
    cards = [offer("pre", rank=1, phase=one_of("extend"), excludes=excluded), *others]
    assert chosen(solve(Request(), cpu, cards)) == {"extend": "pre", "decode": "gen5"}


def test_naming_two_that_exclude_each_other_is_refused(offer, cpu) -> None:
    cards = [
        offer("pre", rank=1, phase=one_of("extend"), excludes=("gen",)),
        offer("gen", rank=1, phase=one_of("decode")),
        offer("both", rank=5),
    ]
    with pytest.raises(NoBackend) as caught:
        solve(Request(), cpu, cards, Policy(prefill_backend="pre", decode_backend="gen"))
    codes = said(caught.value.candidates)
    assert codes["pre", "extend"] == codes["gen", "decode"] == ("EXCLUDED",)
    assert "pre, which never shares a KV cache with gen" in str(caught.value)
    assert "gen, which never shares a KV cache with pre" in str(caught.value)


def test_a_loser_that_is_excluded_is_rejected_for_it(offer, cpu) -> None:
    cards = [
        offer("pre", rank=1, phase=one_of("extend"), excludes=("gen",)),
        offer("gen", rank=1, phase=one_of("decode")),
        offer("both", rank=5),
    ]
    named = solve(Request(), cpu, cards, Policy(decode_backend="gen"))
    assert chosen(named) == {"extend": "both", "decode": "gen"}
    assert said(named.candidates)["pre", "extend"] == ("EXCLUDED",)
    # Where another could decode, it serves the request, and a better rank of decode won
    assert said(solve(Request(), cpu, cards).candidates)["pre", "extend"] == ()


def test_an_exclusion_concerns_only_the_other_phase(offer, cpu) -> None:
    cards = [
        offer("pre", rank=1, phase=one_of("extend"), kind=one_of("mla"), excludes=("both",)),
        offer("both", rank=5, phase=one_of("extend")),
        offer("gen", rank=5, phase=one_of("decode")),
    ]
    assert said(solve(Request(), cpu, cards).candidates)["pre", "extend"] == ("KIND",)


def test_an_encoder_reads_no_cache(offer, cpu) -> None:
    cards = [
        offer("see", rank=1, phase=one_of("encoder"), excludes=("gen",)),
        offer("gen", rank=1),
    ]
    decision = solve(Request.parse("multimodal=true"), cpu, cards)
    assert chosen(decision) == {"extend": "gen", "decode": "gen", "encoder": "see"}


def test_an_encoder_s_hint_does_not_lead_to_a_pair_that_excludes_each_other(offer, cpu) -> None:
    def hints(excludes: tuple[str, ...]) -> set[str]:
        cards = [
            offer("pre", phase=one_of("extend"), excludes=excludes),
            offer("gen", phase=one_of("decode")),
            offer("see", phase=one_of("encoder"), dtype=one_of("float16")),
        ]
        with pytest.raises(NoBackend) as caught:
            solve(Request.parse("multimodal=true,dtype=bf16"), cpu, cards)
        return {
            reason.hint
            for verdict in caught.value.candidates
            for reason in verdict.reasons
            if (verdict.backend, verdict.phase) == ("see", "encoder")
        }

    assert hints(()) == {"dtype=float16"}
    assert hints(("gen",)) == {""}


def test_a_backend_never_excludes_itself_or_an_unknown_name(offer, cpu) -> None:
    cards = [offer("a", rank=1, excludes=("b", "a_alias"), aliases=("a_alias",)), offer("c")]
    assert chosen(solve(Request(), cpu, cards)) == {"extend": "a", "decode": "a"}


def test_an_exclusion_that_holds_at_one_page_size_alone_moves_the_page(offer, cpu) -> None:
    """What a coercion makes possible is told as coerced, not as rejected."""
    cards = [
        offer("pre", rank=1, phase=one_of("extend"), excludes=("gen",)),
        offer("gen", phase=one_of("decode"), page_size=one_of(64)),
        offer("old", phase=one_of("decode"), page_size=one_of(16)),
    ]
    request = Request().replace(origin="default", page_size=64)
    decision = solve(request, cpu, cards)
    assert chosen(decision) == {"extend": "pre", "decode": "old"}
    assert decision.page_size == 16
    (verdict,) = [v for v in decision.candidates if (v.backend, v.phase) == ("pre", "extend")]
    assert verdict.verdict == "coerced"


def test_a_backend_excluded_even_after_a_coercion_is_rejected(offer, cpu) -> None:
    cards = [
        offer("pre", rank=1, phase=one_of("extend"), page_size=one_of(64), excludes=("gen",)),
        offer("gen", phase=one_of("decode")),
        offer("old", phase=one_of("extend"), page_size=one_of(16)),
    ]
    decision = solve(Request().replace(origin="default", page_size=16), cpu, cards)
    assert chosen(decision) == {"extend": "old", "decode": "gen"}
    (verdict,) = [v for v in decision.candidates if (v.backend, v.phase) == ("pre", "extend")]
    assert verdict.verdict == "rejected"
    assert [reason.code for reason in verdict.reasons] == ["PAGE_SIZE", "EXCLUDED"]


def test_rules_on_speculation_in_a_hybrid_are_clauses(offer, clause, cpu) -> None:
    """Decode asks for the breadth of the drafts, whichever backend verifies; extend if it does."""
    paged = clause(phase=ALL, spec_topk=at_most(1))
    tree = clause(phase=ALL, spec_topk=ANY, page_size=one_of(1))
    cards = [
        offer("chain", rank=1, clauses=(paged,)),
        offer("tree", rank=2, clauses=(paged, tree)),
        offer("any", rank=3, clauses=(clause(phase=ALL, spec_topk=ANY),)),
    ]

    def backends(asked: str, **policy: str) -> set[str]:
        return set(chosen(solve(Request.parse(asked), cpu, cards, Policy(**policy))).values())

    assert backends("spec_topk=1,page_size=64") == {"chain"}
    assert backends("spec_topk=4,page_size=1") == {"tree"}
    assert backends("spec_topk=4,page_size=64") == {"any"}
    for mode, field in product(("prefill", "decode"), ("prefill_backend", "decode_backend")):
        asked = f"spec_topk=4,page_size=64,speculative_attention_mode={mode}"
        for name in ("chain", "tree"):
            if (mode, field) == ("decode", "prefill_backend"):
                assert backends(asked, **{field: name}) == {name, "any"}
                continue
            with pytest.raises(NoBackend, match=f"{name} cannot serve"):
                backends(asked, **{field: name})


@pytest.mark.parametrize("asked", ["spec_topk=1", "spec_topk=4", "spec_draft_tokens=9"])
def test_a_prefill_that_verifies_nothing_is_not_asked_for_drafts(offer, cpu, asked) -> None:
    cards = [
        offer("pre", rank=1, phase=one_of("extend"), spec_draft_tokens=at_most(4)),
        offer("rest", rank=5, phase=ALL, spec_topk=ANY),
    ]

    def served(mode: str) -> dict[str, str]:
        asked_so = f"{asked},speculative_attention_mode={mode}"
        return chosen(solve(Request.parse(asked_so), cpu, cards))

    assert served("decode") == {**served("prefill"), "extend": "pre"}
    assert set(served("prefill").values()) == {"rest"}
    with pytest.raises(NoBackend, match="pre cannot serve"):
        solve(Request.parse(asked), cpu, cards, Policy(prefill_backend="pre"))


def test_excludes_are_names(offer) -> None:
    with pytest.raises(InvalidInput, match="excludes: expected a tuple of str"):
        offer("a", excludes="b")


NAMES = ("a", "b", "c", "d", "e")
sketches = st.tuples(
    st.integers(1, 3),
    st.sampled_from([("decode",), ("extend",), ("extend", "decode")]),
    st.sets(st.sampled_from(NAMES), max_size=3),
)


# The fixtures are a function and a value: nothing stays from one example to the next
@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(sketches, min_size=1, max_size=5))
def test_the_best_pair_that_is_allowed_wins(offer, cpu, found) -> None:
    """Against trying every pair."""
    sketched = dict(zip(NAMES, found, strict=False))
    cards = [
        offer(name, rank=rank, phase=one_of(*phases), excludes=tuple(sorted(excludes)))
        for name, (rank, phases, excludes) in sketched.items()
    ]
    pairs = [
        (sketched[decode][0], sketched[extend][0], len({decode, extend}))
        for decode, extend in product(sketched, sketched)
        if "decode" in sketched[decode][1] and "extend" in sketched[extend][1]
        if decode == extend
        or (extend not in sketched[decode][2] and decode not in sketched[extend][2])
    ]
    if not pairs:
        with pytest.raises(NoBackend):
            solve(Request(), cpu, cards)
        return
    names = chosen(solve(Request(), cpu, cards))
    decode, extend = names["decode"], names["extend"]
    assert (sketched[decode][0], sketched[extend][0], len({decode, extend})) == min(pairs)
