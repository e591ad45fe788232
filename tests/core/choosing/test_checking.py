from __future__ import annotations

from dataclasses import replace

import pytest

from attnmux.core import InvalidInput, NoBackend, Platform, Policy, Request, solve
from attnmux.core.cards.card import DEFAULT_RANK
from attnmux.core.facts.request import parse_fields
from attnmux.core.plugin import (
    ANY,
    NONE,
    Caveat,
    Clause,
    Prior,
    at_least,
    at_most,
    includes,
    one_of,
    runtimes,
    versions,
)
from attnmux.core.verbs import check


def codes(verdict) -> list[str]:
    return [reason.code for reason in verdict.reasons]


def test_fits(offer, cpu) -> None:
    verdict = check(offer("a", rank=7).card, "decode", Request(), cpu, plugin="p")
    assert (verdict.verdict, verdict.rank, verdict.reasons) == ("fits", 7, ())
    assert (verdict.backend, verdict.plugin, verdict.phase) == ("a", "p", "decode")


@pytest.mark.parametrize(
    ("asked", "axis", "wanted", "offered", "hint"),
    [
        ("kind=mla", "kind", "mla", "mha", ""),
        (
            "dtype=float32,kv_dtype=bf16",
            "dtype",
            "float32",
            "bfloat16 or float16",
            "dtype=bfloat16",
        ),
        ("kv_dtype=fp8_e5m2", "kv_dtype", "fp8_e5m2", "bfloat16 or float16", "kv_dtype=bfloat16"),
        ("page_size=16", "page_size", "16", "32 or 64", "page_size=32"),
        ("spec_topk=4", "spec_topk", "4", "none", "spec_topk=none"),
        ("head_dim=192", "head_dim", "192", "64 or 128", ""),
        ("head_dim=128,v_head_dim=64", "v_head_dim", "64", "none", ""),
        ("num_q_heads=8,num_kv_heads=8", "group_size", "1", "at least 2", ""),
        ("sliding_window=127", "sliding_window", "127", "none", ""),
        ("sinks=true", "sinks", "yes", "none", ""),
        ("logit_cap=30", "logit_cap", "30.0", "none", ""),
        ("attention_chunk=8", "attention_chunk", "8", "none", ""),
        ("cross_attention=true", "cross_attention", "yes", "none", ""),
        ("deterministic=true", "deterministic", "yes", "none", "deterministic=none"),
        ("graph=true", "graph", "yes", "none", "graph=none"),
        ("lse=true", "lse", "yes", "none", "lse=none"),
    ],
)
def test_each_axis_refuses_undeclared_values(
    offer, cpu, asked, axis, wanted, offered, hint
) -> None:
    card = offer(
        "a", page_size=one_of(32, 64), head_dim=one_of(64, 128), group_size=at_least(2)
    ).card
    (reason,) = check(card, "decode", Request.parse(asked), cpu).reasons
    assert reason.code == axis.upper()
    assert (reason.axis, reason.wanted, reason.offered, reason.hint) == (
        axis,
        wanted,
        offered,
        hint,
    )


@pytest.mark.parametrize(
    ("phase", "asked", "refused"),
    [
        ("extend", "graph=true", False),
        ("decode", "graph=true", True),
        ("extend", "multi_item=true", True),
        ("decode", "multi_item=true", False),
        ("extend", "custom_mask=true", True),
        ("decode", "custom_mask=true", False),
        ("encoder", "kind=mla,sinks=true,page_size=3,sliding_window=4,head_dim=3,lse=1", False),
        ("encoder", "head_dim=3,encoder_head_dim=128", False),
        ("encoder", "head_dim=128,encoder_head_dim=3", True),
        ("decode", "head_dim=128,encoder_head_dim=3", False),
        ("encoder", "deterministic=true", True),
        ("encoder", "dtype=float32", True),
        ("decode", "kind=mla,head_dim=192,v_head_dim=128,kv_lora_rank=512", True),
    ],
)
def test_a_feature_is_asked_in_the_phases_that_use_it(offer, cpu, phase, asked, refused) -> None:
    card = offer("a", phase=ANY, page_size=one_of(32), head_dim=one_of(128)).card
    request = (
        Request.parse(asked) if "page_size" in asked else Request.parse(f"page_size=32,{asked}")
    )
    assert bool(check(card, phase, request, cpu).reasons) == refused


def test_latent_kinds_are_asked_for_the_latent_and_not_the_heads(offer, cpu) -> None:
    card = offer("a", kind=one_of("mla"), head_dim=one_of(64), kv_lora_rank=one_of(512)).card
    request = Request.parse("kind=mla,head_dim=192,v_head_dim=128,kv_lora_rank=512")
    assert not check(card, "decode", request, cpu).reasons
    assert codes(check(card, "decode", request.replace(kv_lora_rank=256), cpu)) == ["KV_LORA_RANK"]


def test_the_machine(offer) -> None:
    card = offer(
        "a",
        vendor=one_of("nvidia"),
        version=versions(">=9.0,<10"),
        runtime=runtimes("cuda>=12.3"),
        features=includes("fast"),
    ).card

    def asked(text: str) -> list[str]:
        return codes(check(card, "decode", Request(), Platform.parse(text, is_here=True)))

    assert asked("nvidia:sm90,cuda=12.3,features=fast") == []
    assert asked("nvidia:sm100,cuda=12.3,features=fast") == ["VERSION"]
    assert asked("nvidia:sm90,cuda=12.2,features=fast") == ["RUNTIME"]
    assert asked("nvidia:sm90,cuda=12.3") == ["FEATURES"]
    assert asked("nvidia:sm90,features=fast") == ["RUNTIME"]
    assert asked("cpu:x86_64") == ["VENDOR", "VERSION", "FEATURES", "RUNTIME"]


def test_a_runtime_that_a_question_does_not_state_counts_as_new_enough(offer) -> None:
    card = offer("a", runtime=runtimes("cuda>=12.3")).card
    for text, fits in (("nvidia:sm90", True), ("nvidia:sm90,cuda=12.2", False)):
        verdict = check(card, "decode", Request(), Platform.parse(text))
        assert (verdict.verdict == "fits") == fits


def test_the_reasons_are_those_of_the_nearest_clause(offer, clause, cpu) -> None:
    far = clause(vendor=one_of("nvidia"), page_size=one_of(16))
    near = clause(page_size=one_of(64), sinks=ANY)
    card = offer("a", clauses=(far, near)).card
    (reason,) = check(card, "decode", Request.parse("page_size=16,sinks=true"), cpu).reasons
    assert (reason.axis, reason.hint) == ("page_size", "page_size=64")


def test_following_all_hints_makes_it_fit(offer, cpu) -> None:
    card = offer(
        "a", dtype=one_of("float16"), kv_dtype=one_of("bfloat16"), page_size=one_of(64)
    ).card
    request = Request.parse("dtype=bf16,page_size=3,lse=true")
    verdict = check(card, "decode", request, cpu)
    hints = {reason.axis: reason.hint for reason in verdict.reasons}
    # An unset KV dtype follows the dtype, which this card does not store
    assert hints == {
        "dtype": "dtype=float16,kv_dtype=bfloat16",
        "page_size": "page_size=64",
        "lse": "lse=none",
    }
    changes = parse_fields(",".join(hints.values()))
    assert not check(card, "decode", request.replace(**changes), cpu).reasons


def test_two_clauses_do_not_add_up(offer, clause, cpu) -> None:
    card = offer(
        "a",
        clauses=(
            clause(dtype=one_of("bfloat16"), page_size=one_of(16)),
            clause(dtype=one_of("float16"), page_size=one_of(64)),
        ),
    ).card
    for dtype, page_size, fits in (
        ("bf16", 16, 1),
        ("fp16", 64, 1),
        ("bf16", 64, 0),
        ("fp16", 16, 0),
    ):
        request = Request(dtype=dtype, page_size=page_size)
        assert (check(card, "decode", request, cpu).verdict == "fits") == bool(fits)


@pytest.mark.parametrize(
    ("installed", "offered"),
    [
        ({}, "torch not installed"),
        ({"torch": "2.9"}, "torch 2.9"),
        ({"torch": "2.11.0+cpu"}, None),
        ({"torch": "2.12.0a0"}, None),
    ],
)
def test_requirements_are_asked_of_the_metadata(offer, cpu, installed, offered) -> None:
    card = offer("a", requires=("torch>=2.11",), extra="torch").card
    verdict = check(card, "decode", Request(), cpu, libraries=installed.get)
    if offered is None:
        assert verdict.verdict == "fits"
    else:
        (reason,) = verdict.reasons
        assert (reason.code, reason.wanted, reason.offered) == ("LIBRARY", "torch>=2.11", offered)
        assert reason.hint == "pip install 'torch>=2.11'"


def test_one_of_several_libraries_is_enough(offer, cpu) -> None:
    card = offer("a", requires=(("new-kernel>=1", "old_kernel"), "other; python_version<'3'")).card
    assert not check(card, "decode", Request(), cpu, libraries={"old_kernel": "0.1"}.get).reasons
    (reason,) = check(card, "decode", Request(), cpu, libraries={"new-kernel": "0.9"}.get).reasons
    assert reason.wanted == "new-kernel>=1 or old_kernel"
    assert reason.offered == "new-kernel 0.9, old_kernel not installed"


@pytest.mark.parametrize(
    ("arch", "installed", "notes"),
    [
        ("x86_64", "1.4", ("fast: slow before 2 (here: lib 1.4)",)),
        ("x86_64", None, ("fast: slow before 2 (here: lib is missing)",)),
        ("x86_64", "2.0", ()),
        ("x86_64", "", ()),  # as another machine's, which count as new enough
        ("aarch64", "1.4", ()),
    ],
)
def test_a_decision_notes_what_a_backend_could_do_better(offer, arch, installed, notes) -> None:
    caveat = Caveat(text="slow before 2", unless=("lib>=2",), arch=("x86_64",))
    decision = solve(
        Request(page_size=1, kv_dtype="bfloat16"),
        Platform.parse(f"cpu:{arch}"),
        [offer("fast", 1, caveats=(caveat,))],
        libraries=lambda name: installed,
    )
    assert decision.notes == notes


def test_another_machine_has_the_libraries_unless_told_otherwise(offer, cpu) -> None:
    one = offer("a", requires=("Flash.Kernel>=3",))
    here, request = replace(cpu, is_here=True), Request(page_size=1, kv_dtype="bfloat16")

    def asked(platform: Platform, *without: str, **given: object) -> list[str]:
        policy = Policy(without=frozenset(without))
        return codes(check(one.card, "decode", Request(), platform, policy=policy, **given))

    assert asked(here) == ["LIBRARY"]
    assert asked(cpu) == []
    assert asked(cpu, "flash_kernel") == asked(cpu, libraries={}.get) == ["LIBRARY"]
    assert asked(here, libraries={"Flash.Kernel": "3"}.get) == []
    assert solve(request, cpu, [one]).phases["decode"].backend == "a"
    with pytest.raises(NoBackend):
        solve(request, here, [one])
    # What its JSON tells is of the machine that reads it
    assert Platform.from_dict(cpu.to_dict()) == cpu
    assert Platform.from_dict(cpu.to_dict()).is_here


@pytest.mark.parametrize("name", ["is_here", "elsewhere"])
def test_where_a_platform_is_is_not_read_from_data(cpu, name) -> None:
    with pytest.raises(InvalidInput, match=name):
        Platform.from_dict({**cpu.to_dict(), name: True})


def test_denied_and_contract(offer, cpu) -> None:
    def asked(policy: Policy, **card: object) -> list[str]:
        return codes(
            check(offer("a", **card).card, "decode", Request(), cpu, policy=policy, plugin="p")
        )

    assert asked(Policy(deny=("a",))) == asked(Policy(deny=("p/a",))) == ["DENIED"]
    assert asked(Policy(allow=("b",))) == ["DENIED"]
    assert asked(Policy(allow=("x", "p/a"))) == []
    assert asked(Policy(), contract=">=2") == ["CONTRACT"]
    assert asked(Policy(deny=("a",)), contract=">=2") == ["CONTRACT", "DENIED"]


def test_a_card_without_clauses_serves_nothing(offer, cpu) -> None:
    assert codes(check(offer("a", clauses=()).card, "decode", Request(), cpu)) == ["NO_CLAUSE"]


def test_the_first_prior_that_holds_counts(offer, cpu) -> None:
    card = offer(
        "a",
        spec_topk=ANY,
        priors=(
            Prior(rank=10, when=Clause.when(spec_topk=at_most(1), page_size=one_of(1)), source="x"),
            Prior(rank=20, when=Clause.when(page_size=one_of(64)), source="x"),
        ),
    ).card

    def rank(asked: str) -> int | None:
        return check(card, "decode", Request.parse(asked), cpu).rank

    assert rank("") == rank("page_size=1") == rank("page_size=1,spec_topk=1") == 10
    assert rank("page_size=64") == 20
    assert rank("page_size=1,spec_topk=2") == DEFAULT_RANK


def test_equal_head_dims_are_no_special_wish(offer, cpu) -> None:
    card = offer("a").card
    assert not check(card, "decode", Request.parse("head_dim=128,v_head_dim=128"), cpu).reasons


def test_a_hint_that_would_not_help_is_left_out(offer, cpu) -> None:
    card = offer("a", kv_dtype=NONE).card
    (reason,) = check(card, "decode", Request.parse("dtype=bf16"), cpu).reasons
    assert (reason.axis, reason.hint) == ("kv_dtype", "")
