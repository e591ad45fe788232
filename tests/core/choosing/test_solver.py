from __future__ import annotations

import json
from dataclasses import replace

import pytest

from attnmux.core import (
    Decision,
    InvalidInput,
    LayerGroup,
    NoBackend,
    Plugins,
    Policy,
    Request,
    solve,
)
from attnmux.core.choosing.checking import Rank
from attnmux.core.facts.errors import UnknownBackend
from attnmux.core.plugin import (
    ANY,
    Clause,
    Option,
    Prior,
    anything_but,
    emulated,
    multiple_of,
    one_of,
)

NO_LIBRARIES = {}.get
ALL_PHASES = one_of("extend", "decode", "verify", "draft", "encoder")


def chosen(decision) -> dict[str, str]:
    return {phase: choice.backend for phase, choice in decision.phases.items()}


def verdicts(candidates, backend: str) -> dict[str, str]:
    return {v.phase: v.verdict for v in candidates if v.backend == backend}


def test_the_best_rank_wins_each_phase(offer, cpu) -> None:
    cards = [
        offer("a", rank=10, phase=one_of("decode")),
        offer("b", rank=20),
        offer("c", rank=5, page_size=one_of(64), kind=one_of("mla")),
    ]
    decision = solve(Request(), cpu, cards)
    assert chosen(decision) == {"extend": "b", "decode": "a"}
    assert verdicts(decision.candidates, "a") == {"extend": "rejected", "decode": "fits"}
    assert verdicts(decision.candidates, "c") == {"extend": "rejected", "decode": "rejected"}
    assert decision.phases["decode"].factory == "fake.a:Backend"
    assert decision.phases["decode"].distribution == "attnmux-fake"
    assert decision.phases["decode"].version == "1.2.3"


def test_every_candidate_has_a_verdict_in_every_phase(offer, cpu) -> None:
    cards = [
        offer("a", phase=ALL_PHASES, spec_topk=ANY),
        offer("b"),
        offer("c", kind=one_of("mla")),
    ]
    decision = solve(Request.parse("spec_topk=2,multimodal=true"), cpu, cards)
    assert len(decision.candidates) == 3 * 5
    for verdict in decision.candidates:
        assert (verdict.verdict == "rejected") == bool(verdict.reasons) == (verdict.rank is None)


def test_ties_go_to_fewer_backends(offer, cpu) -> None:
    cards = [
        offer("a", rank=10, phase=one_of("decode")),
        offer("b", rank=10, phase=one_of("extend")),
        offer("z", rank=10),
    ]
    assert chosen(solve(Request(), cpu, cards)) == {"extend": "z", "decode": "z"}


def test_decode_s_rank_outweighs_extend_s(offer, cpu) -> None:
    cards = [
        offer("a", rank=10, page_size=one_of(64), phase=one_of("decode")),
        offer("b", rank=20, page_size=one_of(16), phase=one_of("decode")),
        offer("c", rank=1, page_size=one_of(16), phase=one_of("extend")),
        offer("d", rank=9, page_size=one_of(64), phase=one_of("extend")),
    ]
    decision = solve(Request(), cpu, cards)
    assert chosen(decision) == {"decode": "a", "extend": "d"}
    assert decision.page_size == 64


@pytest.mark.parametrize(
    ("decode", "extend", "page_size"),
    [
        (ANY, ANY, 1),
        (one_of(64, 32), ANY, 64),
        (one_of(64, 32), one_of(16, 32), 32),
        (multiple_of(16), ANY, 16),
        (multiple_of(16), multiple_of(24), 48),
        (emulated(1), one_of(128), 128),
        (emulated(1), ANY, 1),
        (ANY, one_of(128), 128),
        (anything_but(1), ANY, 2),
        (multiple_of(16), anything_but(16, 32), 48),
    ],
)
def test_an_unset_page_size_is_found_for_all_phases(offer, cpu, decode, extend, page_size) -> None:
    cards = [
        offer("a", rank=1, phase=one_of("decode"), page_size=decode),
        offer("b", rank=1, phase=one_of("extend"), page_size=extend),
    ]
    decision = solve(Request(), cpu, cards)
    assert decision.page_size == decision.request.page_size == page_size
    assert decision.request.origins["page_size"] == "default"


def test_an_unset_kv_dtype_is_found_among_those_that_are_not_excluded(offer, cpu) -> None:
    cards = [
        offer("a", phase=one_of("decode"), kv_dtype=anything_but("bfloat16")),
        offer("b", phase=one_of("extend"), kv_dtype=anything_but("float16")),
    ]
    assert solve(Request(), cpu, cards).kv_dtype == "float32"


def test_no_common_page_size_is_said(offer, cpu) -> None:
    cards = [
        offer("a", phase=one_of("decode"), page_size=one_of(16, 32)),
        offer("b", phase=one_of("extend"), page_size=one_of(128)),
    ]
    with pytest.raises(NoBackend) as caught:
        solve(Request(), cpu, cards)
    reasons = {r.code for v in caught.value.candidates for r in v.reasons}
    assert "NO_COMMON_POINT" in reasons
    assert all(verdict.reasons for verdict in caught.value.candidates)


@pytest.mark.parametrize(
    ("asked", "kv_dtype"),
    [("", "float16"), ("dtype=bf16", "bfloat16"), ("dtype=bf16,kv_dtype=fp8_e4m3", "fp8_e4m3")],
)
def test_kv_dtype(offer, cpu, asked, kv_dtype) -> None:
    card = offer("a", kv_dtype=one_of("float16", "bfloat16", "fp8_e4m3"))
    decision = solve(Request.parse(asked), cpu, [card])
    assert decision.kv_dtype == decision.request.kv_dtype == kv_dtype


def test_kv_dtype_where_none_is_requested(offer, cpu) -> None:
    assert solve(Request(), cpu, [offer("a", kv_dtype=ANY)]).kv_dtype == "bfloat16"


@pytest.mark.parametrize(("mode", "followed"), [("prefill", "extend"), ("decode", "decode")])
def test_verify_and_draft_follow(offer, cpu, mode, followed) -> None:
    cards = [
        offer("a", rank=1, phase=one_of("decode", "verify", "draft"), spec_topk=ANY),
        offer("b", rank=1, phase=one_of("extend", "verify", "draft"), spec_topk=ANY),
    ]
    request = Request.parse(f"spec_topk=2,speculative_attention_mode={mode}")
    names = chosen(solve(request, cpu, cards))
    assert names["verify"] == names["draft"] == names[followed]


def test_a_backend_is_not_taken_for_a_phase_whose_followers_it_cannot_serve(offer, cpu) -> None:
    cards = [
        offer("a", rank=1, spec_topk=ANY),
        offer("b", rank=9, phase=ALL_PHASES, spec_topk=ANY),
    ]
    decision = solve(Request.parse("spec_topk=2"), cpu, cards)
    assert chosen(decision) == {"extend": "b", "decode": "a", "verify": "b", "draft": "b"}
    (verdict,) = [v for v in decision.candidates if (v.backend, v.phase) == ("a", "extend")]
    assert [reason.code for reason in verdict.reasons] == ["PHASES_TOGETHER"]


def test_only_requested_phases_appear(offer, cpu) -> None:
    cards = [offer("a", phase=ALL_PHASES)]
    assert list(solve(Request(phases=("encoder",)), cpu, cards).phases) == ["encoder"]
    assert list(solve(Request(phases=("decode",)), cpu, cards).phases) == ["decode"]


@pytest.mark.parametrize(
    ("policy", "names"),
    [
        (Policy(backend="b"), {"extend": "b", "decode": "b"}),
        (Policy(prefill_backend="b"), {"extend": "b", "decode": "a"}),
        (Policy(decode_backend="b"), {"extend": "a", "decode": "b"}),
        (Policy(backend="b", decode_backend="c"), {"extend": "b", "decode": "c"}),
        (Policy(prefill_backend="b", decode_backend="b"), {"extend": "b", "decode": "b"}),
        (Policy(backend="other/c"), {"extend": "c", "decode": "c"}),
        (Policy(backend="bee"), {"extend": "b", "decode": "b"}),
        (Policy(prefer=("c", "b")), {"extend": "c", "decode": "c"}),
        (Policy(deny=("a",)), {"extend": "b", "decode": "b"}),
        (Policy(allow=("other/c",)), {"extend": "c", "decode": "c"}),
    ],
)
def test_policy(offer, cpu, policy, names) -> None:
    cards = [
        offer("a", rank=1),
        offer("b", rank=2, aliases=("bee",)),
        offer("c", rank=3, plugin="other"),
    ]
    decision = solve(Request(), cpu, cards, policy)
    assert chosen(decision) == names
    assert not decision.coercions


def test_one_name_spelled_two_ways_is_one_decision(offer, cpu) -> None:
    cards = [offer("a", rank=1), offer("b", rank=2)]
    together = solve(Request(), cpu, cards, Policy(backend="b"))
    apart = solve(Request(), cpu, cards, Policy(prefill_backend="b", decode_backend="b"))
    assert together == apart
    assert together.hash == apart.hash


@pytest.mark.parametrize("field", ["backend", "prefill_backend", "decode_backend"])
def test_a_named_backend_is_kept_or_is_an_error(offer, cpu, field) -> None:
    cards = [offer("a", rank=1), offer("b", page_size=one_of(64))]
    with pytest.raises(NoBackend) as caught:
        solve(Request.parse("page_size=16"), cpu, cards, Policy(**{field: "b"}))
    assert "b cannot serve" in str(caught.value)
    assert "page_size=64" in str(caught.value)
    assert verdicts(caught.value.candidates, "a") == {"extend": "fits", "decode": "fits"}


@pytest.mark.parametrize(
    ("origin", "said"),
    [
        ("env", r" \(b is prefill_backend of the environment\)"),
        ("config", r" \(b is prefill_backend of the configuration file\)"),
    ],
)
def test_an_unknown_name_from_elsewhere_is_reported_with_its_source(
    offer, cpu, origin, said
) -> None:
    cards = [offer("a"), offer("b", page_size=one_of(64))]
    origins = {"prefill_backend": origin}
    with pytest.raises(NoBackend, match=f"b cannot serve extend on .*{said}"):
        solve(Request(page_size=1), cpu, cards, Policy(prefill_backend="b", origins=origins))
    with pytest.raises(UnknownBackend, match="named by prefill_backend of the"):
        solve(Request(), cpu, cards, Policy(prefill_backend="c", origins=origins))
    with pytest.raises(NoBackend) as caught:
        solve(Request(page_size=1), cpu, cards, Policy(prefill_backend="b"))
    assert "prefill_backend" not in str(caught.value)


def test_the_nearest_fix_comes_first(offer, cpu) -> None:
    cards = [
        offer("a", arch=one_of("aarch64")),
        offer("b", page_size=one_of(64), dtype=one_of("float32")),
        offer("c", page_size=one_of(32)),
    ]
    with pytest.raises(NoBackend) as caught:
        solve(Request.parse("page_size=16,dtype=bf16"), cpu, cards)
    lines = str(caught.value).splitlines()[1:]
    assert [line.split()[0] for line in lines] == ["c", "b", "a"]


def test_no_plugin_at_all(cpu) -> None:
    with pytest.raises(NoBackend, match="pip install attnmux-cpu"):
        solve(Request(), cpu, [])


def test_a_refusal_names_backends_of_other_hardware_without_their_reasons(offer, cpu) -> None:
    near = offer("near", page_size=one_of(64))
    far = [offer(name, vendor=one_of("nvidia")) for name in ("far", "further")]
    with pytest.raises(NoBackend) as caught:
        solve(Request(page_size=16), cpu, [near, *far])
    lines = str(caught.value).splitlines()
    assert "page_size=64" in lines[1]
    assert lines[2:] == ["  for other hardware: far, further"]
    assert {verdict.backend for verdict in caught.value.candidates} == {"near", "far", "further"}


def test_a_refusal_names_backends_for_other_attention_likewise(offer, cpu) -> None:
    near = offer("near", page_size=one_of(64))
    latent = [offer(name, kind=one_of("mla")) for name in ("one", "two")]
    far = offer("far", kind=one_of("mla"), vendor=one_of("nvidia"))
    with pytest.raises(NoBackend) as caught:
        solve(Request(page_size=16), cpu, [near, *latent, far])
    lines = str(caught.value).splitlines()
    assert lines[1].startswith("  near (fake) for extend, decode: ")
    assert lines[2:] == [
        "  for other hardware: far",
        "  for other kinds of attention: one, two",
    ]
    with pytest.raises(NoBackend) as caught:
        solve(Request(page_size=16), cpu, [*latent, far])
    lines = str(caught.value).splitlines()
    assert lines[1:] == [
        "  one (fake) for extend, decode: kind: asked for mha, serves mla",
        "  two (fake) for extend, decode: kind: asked for mha, serves mla",
        "  for other hardware: far",
    ]


def test_a_refusal_says_once_which_phases_a_backend_lacks(offer, cpu) -> None:
    half = offer("half", phase=one_of("extend"), page_size=one_of(64))
    with pytest.raises(NoBackend) as caught:
        solve(Request(page_size=16, spec_topk=1), cpu, [half])
    lines = str(caught.value).splitlines()
    assert sum("phase: " in line for line in lines) == 1
    asked = "phase: asked for decode, verify, draft"
    assert f"half (fake) for decode, verify, draft: {asked}" in lines[2]


def test_a_refusal_keeps_the_reasons_where_nothing_else_is_there_or_was_named(offer, cpu) -> None:
    far = offer("far", vendor=one_of("nvidia"))
    with pytest.raises(NoBackend, match="vendor: needs nvidia, this is cpu"):
        solve(Request(), cpu, [far])
    with pytest.raises(NoBackend, match="vendor: needs nvidia, this is cpu"):
        solve(Request(), cpu, [offer("near"), far], Policy(backend="far"))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("flahs", "did you mean 'flash'?"),
        ("torch_nativ", "pip install attnmux-cpu"),
        ("flashinfer", "flashinfer comes with attnmux-nvidia: pip install attnmux-nvidia"),
        ("fake/flahs", "did you mean 'fake/flash'?"),
        ("zzzz", "the installed plugins offer flash"),
    ],
)
def test_an_unknown_name(offer, cpu, name, said) -> None:
    with pytest.raises(UnknownBackend) as caught:
        solve(Request(), cpu, [offer("flash")], Policy(backend=name), libraries=NO_LIBRARIES)
    assert said in str(caught.value)
    assert "(named by" not in str(caught.value)
    assert caught.value.name == name


def test_a_known_name_that_the_installed_plugin_does_not_offer(offer, cpu) -> None:
    with pytest.raises(UnknownBackend, match=r"installed version 9\.9 does not offer it"):
        solve(
            Request(),
            cpu,
            [offer("flash")],
            Policy(backend="torch_native"),
            libraries={"attnmux-cpu": "9.9"}.get,
        )


def test_two_plugins_with_one_name(offer, cpu) -> None:
    cards = [offer("same", rank=2, plugin="x"), offer("same", rank=1, plugin="y")]
    with pytest.raises(InvalidInput, match="one of x/same, y/same"):
        solve(Request(), cpu, cards, Policy(backend="same"))
    assert solve(Request(), cpu, cards, Policy(backend="x/same")).phases["decode"].plugin == "x"
    assert solve(Request(), cpu, cards).phases["decode"].plugin == "y"


def test_one_alias_of_several_backends_means_the_one_that_fits(offer, cpu) -> None:
    cards = [
        offer("flash"),
        offer("flash_mla", aliases=("flash",), kind=one_of("mla"), kv_lora_rank=ANY),
    ]
    policy = Policy(backend="flash")
    assert chosen(solve(Request(), cpu, cards, policy))["decode"] == "flash"
    request = Request.parse("kind=mla,kv_lora_rank=512")
    assert chosen(solve(request, cpu, cards, policy))["decode"] == "flash_mla"


def test_another_plugin_s_alias_takes_no_name_over(offer, cpu) -> None:
    cards = [offer("flash", rank=9), offer("other", rank=1, plugin="x", aliases=("flash",))]
    assert chosen(solve(Request(), cpu, cards, Policy(backend="flash")))["decode"] == "flash"
    assert chosen(solve(Request(), cpu, cards, Policy(backend="x/flash")))["decode"] == "other"


def test_an_alias_of_two_plugins_is_an_error(offer, cpu) -> None:
    cards = [offer(name, plugin=name * 2, aliases=("flash",)) for name in ("a", "b")]
    with pytest.raises(InvalidInput, match="one of aa/a, bb/b"):
        solve(Request(), cpu, cards, Policy(backend="flash"))


def test_the_same_card_twice_is_an_error(offer, cpu) -> None:
    with pytest.raises(InvalidInput, match="fake/a more than once"):
        solve(Request(), cpu, [offer("a"), offer("a")])


def test_a_card_without_its_plugin_is_no_offer(offer, cpu) -> None:
    with pytest.raises(
        InvalidInput, match=r"Plugins.load\(\).offers\(\) are, got one of type Back"
    ):
        solve(Request(), cpu, [offer("a").card])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"request": "dtype=bf16"}, "request: expected a Request, such as Request.parse"),
        ({"platform": "cpu:x86_64"}, "platform: expected a Platform, such as Platform.parse"),
        ({"policy": "a"}, "policy: expected a Policy, such as Policy.backend"),
        ({"policy": {}}, "got one of type dict"),
        ({"offers": Plugins()}, "are, got one of type Plugins"),
        ({"offers": None}, "are, got one of type NoneType"),
    ],
)
def test_arguments_of_other_types_are_refused(offer, cpu, changes, said) -> None:
    given = {"request": Request(), "platform": cpu, "offers": [offer("a")], "policy": None}
    with pytest.raises(InvalidInput, match=said):
        solve(**{**given, **changes})


def test_a_companion_serves_the_phases_that_a_named_backend_lacks(offer, cpu) -> None:
    cards = [
        offer("only_decode", page_size=one_of(64), phase=one_of("decode"), companions=("mate",)),
        offer("mate", rank=5),
        offer("better", rank=1),
    ]
    decision = solve(Request(), cpu, cards, Policy(backend="only_decode"))
    assert chosen(decision) == {"extend": "mate", "decode": "only_decode"}
    assert decision.page_size == 64
    (change,) = decision.coercions
    assert (change.field, change.old, change.new) == ("backend for extend", "only_decode", "mate")
    with pytest.raises(NoBackend):
        solve(Request(), cpu, cards, Policy(prefill_backend="only_decode"))


def test_a_companion_that_is_not_installed_leaves_the_others(offer, cpu) -> None:
    only_decode = offer("a", phase=one_of("decode"), companions=("absent", "mate"))
    decision = solve(Request(), cpu, [only_decode, offer("mate")], Policy(backend="a"))
    assert chosen(decision) == {"extend": "mate", "decode": "a"}
    with pytest.raises(UnknownBackend, match="a does not serve extend and names it as its comp"):
        solve(Request(), cpu, [only_decode], Policy(backend="a"))


@pytest.mark.parametrize(
    "policy",
    [
        Policy(mm_backend="nope"),
        Policy(backend="nope", prefill_backend="a", decode_backend="a"),
    ],
)
def test_a_name_that_no_phase_needs_is_looked_at_too(offer, cpu, policy) -> None:
    with pytest.raises(UnknownBackend, match="'nope'"):
        solve(Request(), cpu, [offer("a")], policy)
    configured = dict.fromkeys(("backend", "mm_backend"), "config")
    solve(Request(), cpu, [offer("a")], replace(policy, origins=configured))


def test_a_user_s_value_is_never_changed_without_leave(offer, cpu) -> None:
    cards = [offer("a", page_size=one_of(64))]
    request = Request.parse("page_size=16,graph=true")
    with pytest.raises(NoBackend):
        solve(request, cpu, cards)
    decision = solve(request, cpu, cards, Policy(allow_coercion=True))
    assert decision.page_size == 64
    assert not decision.request.graph
    changes = {c.field: (c.old, c.new, c.origin) for c in decision.coercions}
    assert changes == {"page_size": ("16", "64", "user"), "graph": ("True", "False", "user")}
    assert verdicts(decision.candidates, "a") == {"extend": "coerced", "decode": "coerced"}


@pytest.mark.parametrize("origin", ["user", "env", "config"])
def test_nor_is_one_of_the_environment_or_the_file(offer, cpu, origin) -> None:
    request = Request().replace(origin=origin, page_size=16)
    with pytest.raises(NoBackend):
        solve(request, cpu, [offer("a", page_size=one_of(64))])


def test_a_default_may_be_changed_and_that_is_recorded(offer, cpu) -> None:
    request = Request().replace(origin="default", graph=True)
    decision = solve(request, cpu, [offer("a")])
    (change,) = decision.coercions
    assert (change.field, change.new, change.origin) == ("graph", "False", "default")
    assert "a for decode" in change.because


def test_fewer_coercions_win_over_rank(offer, cpu) -> None:
    cards = [offer("a", rank=1, page_size=one_of(64)), offer("b", rank=9)]
    policy = Policy(allow_coercion=True)
    decision = solve(Request.parse("page_size=16"), cpu, cards, policy)
    assert chosen(decision)["decode"] == "b"
    assert not decision.coercions
    assert verdicts(decision.candidates, "a")["decode"] == "coerced"


def test_options_are_read_against_the_card(offer, cpu) -> None:
    options = (
        Option(name="splits", type=int, default=8),
        Option(name="mode", type=str, default="fast", choices=("fast", "exact")),
        Option(name="fuse", type=bool, default=False),
    )
    cards = [offer("a", options=options, rank=1), offer("b")]
    given = {"a": {"splits": "4", "fuse": "yes"}}
    decision = solve(Request(), cpu, cards, Policy(options=given))
    assert decision.phases["decode"].options == {"splits": 4, "mode": "fast", "fuse": True}
    plain = solve(Request(), cpu, cards)
    assert plain.phases["decode"].options == {"splits": 8, "mode": "fast", "fuse": False}
    assert plain.hash != decision.hash


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"a": {"split": "4"}}, "did you mean 'splits'"),
        ({"a": {"splits": "many"}}, "a value of type int"),
        ({"a": {"splits": 1.5}}, "a value of type int"),
        ({"a": {"splits": True}}, "a value of type int"),
        ({"a": {"splits": [4]}}, "options of a of splits: expected bool or int or float or str"),
        ({"a": {"splits": -3}}, "a value of type int, at least 1, at most 64"),
        ({"a": {"splits": "65"}}, "a value of type int, at least 1, at most 64"),
        ({"a": {"share": float("nan")}}, "a value of type float, at least 0.0"),
        ({"a": {"share": "-1"}}, "a value of type float, at least 0.0"),
        ({"a": {"mode": "slow"}}, "one of fast, exact"),
        ({"a": {"fuse": "maybe"}}, "a value of type bool"),
        ({"b": {"splits": 1}}, "it has none"),
        ({"c": {"splits": 1}}, "unknown attention backend 'c'"),
    ],
)
def test_options_that_do_not_exist_or_do_not_fit(offer, cpu, given, said) -> None:
    options = (
        Option(name="splits", type=int, default=8, least=1, most=64),
        Option(name="share", type=float, default=0.5, least=0.0),
        Option(name="mode", type=str, default="fast", choices=("fast", "exact")),
        Option(name="fuse", type=bool, default=False),
    )
    cards = [offer("a", options=options), offer("b")]
    with pytest.raises((InvalidInput, UnknownBackend)) as caught:
        solve(Request(), cpu, cards, Policy(options=given))
    assert said in str(caught.value)


def test_a_library_that_can_be_installed_is_no_obstacle_to_a_hint(offer, cpu) -> None:
    def hints(**standing: object) -> list[str]:
        lacking = offer("a", requires=("fast>=1",), page_size=one_of(64), **standing)
        extend = offer("b", requires=("fast>=1",), phase=one_of("extend"))
        request = Request(page_size=16)
        with pytest.raises(NoBackend) as caught:
            solve(request, cpu, [lacking, extend], libraries=NO_LIBRARIES)
        (said,) = [v for v in caught.value.candidates if (v.backend, v.phase) == ("a", "decode")]
        return [reason.hint for reason in said.reasons]

    assert hints() == ["pip install 'fast>=1'", "page_size=64"]
    assert not any(hints(contract=">=2"))


def test_another_ranking_can_be_joined_in(offer, cpu) -> None:
    """As measurements of the machine are: a function that may overrule the priors."""
    measured = {"b": 1}

    def ranking(offer, question) -> Rank:
        return Rank(measured.get(offer.card.name, 100))

    cards = [offer("a", rank=10), offer("b", rank=20)]
    assert chosen(solve(Request(), cpu, cards, ranking=ranking))["decode"] == "b"


def test_a_rank_that_depends_on_the_page_counts_at_the_page_decided(offer, cpu) -> None:
    priors = (
        Prior(rank=1, when=Clause.when(page_size=one_of(1)), source="x"),
        Prior(rank=50, source="x"),
    )
    cards = [offer("a", priors=priors), offer("b", rank=20)]
    assert chosen(solve(Request(), cpu, cards))["decode"] == "a"
    decision = solve(Request.parse("page_size=16"), cpu, cards)
    assert chosen(decision)["decode"] == "b"
    assert {v.rank for v in decision.candidates if v.backend == "a"} == {50}


def test_a_rank_is_that_at_the_decided_page_size(offer, cpu) -> None:
    priors = (
        Prior(rank=1, when=Clause.when(page_size=one_of(1)), source="x"),
        Prior(rank=50, source="x"),
    )
    decision = solve(Request(), cpu, [offer("a", priors=priors, page_size=one_of(64))])
    assert {verdict.rank for verdict in decision.candidates} == {50}


def test_only_failing_axes_are_reported(offer, cpu) -> None:
    cards = [offer("a", phase=one_of("extend")), offer("b", phase=one_of("extend"))]
    with pytest.raises(NoBackend) as caught:
        solve(Request(), cpu, cards, Policy(prefill_backend="b"))
    assert str(caught.value).startswith("no attention backend serves decode on ")
    assert "for extend" not in str(caught.value)


def test_an_encoder_that_nothing_serves(offer, cpu) -> None:
    with pytest.raises(NoBackend, match="multimodal=false asks for no encoder"):
        solve(Request.parse("multimodal=true"), cpu, [offer("a")])


@pytest.mark.parametrize("name", ["b", "bee", "fake/b", "fake/bee"])
def test_listed_names_are_names_aliases_or_addresses(offer, cpu, name) -> None:
    cards = [offer("a", rank=1), offer("b", rank=2, aliases=("bee",)), offer("c", rank=3)]
    assert chosen(solve(Request(), cpu, cards, Policy(prefer=(name,))))["decode"] == "b"
    assert chosen(solve(Request(), cpu, cards, Policy(allow=(name,))))["decode"] == "b"
    denied = solve(Request(), cpu, cards[1:], Policy(deny=(name,)))
    assert chosen(denied)["decode"] == "c"
    (verdict,) = [v for v in denied.candidates if (v.backend, v.phase) == ("b", "decode")]
    assert [reason.code for reason in verdict.reasons] == ["DENIED"]


def test_a_listed_name_means_every_backend_that_bears_it(offer, cpu) -> None:
    cards = [
        offer("flash", rank=1),
        offer("flash_mla", rank=2, aliases=("flash",)),
        offer("flash", rank=3, plugin="other"),
        offer("last", rank=4),
    ]
    assert chosen(solve(Request(), cpu, cards, Policy(deny=("flash",))))["decode"] == "last"
    decision = solve(Request(), cpu, cards, Policy(deny=("fake/flash",)))
    assert decision.phases["decode"].plugin == "other"


@pytest.mark.parametrize("verb", ["allow", "deny", "prefer"])
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("flahs", "did you mean 'flash'?"),
        ("fake/flahs", "did you mean 'fake/flash'?"),
        ("other/flash", "did you mean 'fake/flash'?"),
        ("torch_nativ", "did you mean 'torch_native'?"),
        ("zzzz", "the installed plugins offer flash"),
    ],
)
def test_a_listed_name_that_means_nothing_is_an_error(offer, cpu, verb, name, said) -> None:
    policy = Policy(**{verb: ("flash", name)})
    with pytest.raises(UnknownBackend) as caught:
        solve(Request(), cpu, [offer("flash")], policy, libraries=NO_LIBRARIES)
    assert caught.value.name == name
    assert said in str(caught.value)
    assert f"among the backends to {verb}" in str(caught.value)


@pytest.mark.parametrize("verb", ["allow", "deny", "prefer"])
def test_a_backend_whose_plugin_is_not_here_may_be_listed(offer, cpu, verb) -> None:
    """One configuration can serve several machines."""
    kept = {"allow": "flash"}.get(verb, "torch_native")
    policy = Policy(**{verb: ("torch_native", kept)})
    assert chosen(solve(Request(), cpu, [offer("flash")], policy))["decode"] == "flash"
    with pytest.raises(NoBackend, match="no plugin offers one"):
        solve(Request(), cpu, [], Policy(**{verb: ("zzzz",)}))


@pytest.mark.parametrize("contract", [">=0,<1", ">=2", "==1.1", "!=1.0"])
def test_a_card_for_another_contract_is_never_taken(offer, cpu, contract) -> None:
    cards = [offer("old", rank=1, contract=contract), offer("new", rank=2)]
    decision = solve(Request(), cpu, cards)
    assert chosen(decision) == {"extend": "new", "decode": "new"}
    (verdict,) = [v for v in decision.candidates if (v.backend, v.phase) == ("old", "decode")]
    assert [reason.code for reason in verdict.reasons] == ["CONTRACT"]
    with pytest.raises(NoBackend, match="old cannot serve"):
        solve(Request(), cpu, cards, Policy(backend="old"))


def grouped(**changes) -> Request:
    """Layers of 64 dims with a window, and two without one of 512."""
    others = [LayerGroup(layers=2, num_q_heads=8, num_kv_heads=1, head_dim=512)]
    given = {"num_q_heads": 8, "num_kv_heads": 2, "head_dim": 64, "sliding_window": 31, **changes}
    return Request(other_layers=others, **given)


def by_group(decision) -> list[str]:
    return [each.phases["decode"].backend for each in decision.groups]


def test_each_group_of_layers_has_the_best_backend_that_shares_a_page_size(offer, cpu) -> None:
    cards = [
        offer("narrow", rank=10, head_dim=one_of(64), page_size=one_of(1, 16), sliding_window=ANY),
        offer("wide", rank=10, head_dim=one_of(512), page_size=multiple_of(16)),
        offer("slow", rank=90, sliding_window=ANY),
    ]
    decision = solve(grouped(), cpu, cards)
    assert by_group(decision) == ["narrow", "wide"]
    assert decision.page_size == 16
    assert {each.page_size for each in decision.groups} == {16}
    assert by_group(solve(grouped(page_size=1), cpu, cards)) == ["narrow", "slow"]
    assert by_group(solve(grouped(page_size=32), cpu, cards)) == ["slow", "wide"]


def test_a_page_size_that_no_group_would_take_alone(offer, cpu) -> None:
    """12 is the least multiple of both steps; each prefers its own."""
    cards = [
        offer("a", head_dim=one_of(64), page_size=multiple_of(4), sliding_window=ANY),
        offer("b", head_dim=one_of(512), page_size=multiple_of(6)),
    ]
    decision = solve(grouped(), cpu, cards)
    assert (by_group(decision), decision.page_size) == (["a", "b"], 12)


def test_a_window_is_demanded_of_its_own_group_alone(offer, cpu) -> None:
    cards = [offer("windows", rank=90, sliding_window=ANY), offer("plain", rank=10)]
    assert by_group(solve(grouped(), cpu, cards)) == ["windows", "plain"]


def test_groups_that_nothing_serves_are_named(offer, cpu) -> None:
    narrow = offer("a", head_dim=one_of(64), page_size=one_of(1), sliding_window=ANY)
    with pytest.raises(NoBackend, match=r"^2 layers with 8/1 heads of 512: no attention") as caught:
        solve(grouped(), cpu, [narrow])
    assert caught.value.candidates
    with pytest.raises(
        NoBackend, match=r"^layers with 8/2 heads of 128 and a window of 31: no attention"
    ):
        solve(grouped(head_dim=128), cpu, [narrow])
    wide = offer("b", head_dim=one_of(512), page_size=one_of(16))
    with pytest.raises(
        NoBackend, match="no page size and KV dtype serves layers with 8/2 heads of 64 and"
    ):
        solve(grouped(), cpu, [narrow, wide])


def keeping(kept: str | None = "bfloat16", **changes) -> Request:
    """8-bit layers, and two of the same shape that keep another dtype."""
    others = [LayerGroup(layers=2, num_q_heads=8, num_kv_heads=2, head_dim=64, kv_dtype=kept)]
    given = {"num_q_heads": 8, "num_kv_heads": 2, "head_dim": 64, "dtype": "bfloat16"}
    return Request(other_layers=others, **{**given, "kv_dtype": "fp8_e4m3", **changes})


def test_layers_that_keep_a_kv_dtype_have_a_backend_for_it(offer, cpu) -> None:
    cards = [
        offer("low", rank=10, kv_dtype=one_of("fp8_e4m3"), page_size=one_of(1, 16)),
        offer("high", rank=10, kv_dtype=one_of("bfloat16"), page_size=multiple_of(16)),
        offer("slow", rank=90, kv_dtype=ANY),
    ]
    decision = solve(keeping(), cpu, cards)
    assert by_group(decision) == ["low", "high"]
    assert [each.kv_dtype for each in decision.groups] == ["fp8_e4m3", "bfloat16"]
    assert (decision.kv_dtype, decision.page_size) == ("fp8_e4m3", 16)
    assert "for 2 layers with 8/2 heads of 64, KV in bfloat16: high" in decision.summary()
    assert by_group(solve(keeping(page_size=1), cpu, cards)) == ["low", "slow"]
    assert by_group(solve(keeping(kept=None), cpu, cards)) == ["low", "low"]
    read = Decision.from_json(decision.to_json())
    assert (read.hash, read.groups[1].kv_dtype) == (decision.hash, "bfloat16")


def test_kv_dtypes_that_nothing_serves_together_are_named(offer, cpu) -> None:
    low = offer("low", kv_dtype=one_of("fp8_e4m3"), page_size=one_of(1))
    with pytest.raises(NoBackend, match=r"^2 layers with 8/2 heads of 64, KV in bfloat16: no"):
        solve(keeping(), cpu, [low])
    high = offer("high", kv_dtype=one_of("bfloat16"), page_size=one_of(16))
    both = "layers with 8/2 heads of 64, KV in fp8_e4m3 and 2 layers .* 64, KV in bfloat16"
    with pytest.raises(NoBackend, match=f"no page size and KV dtype serves {both}"):
        solve(keeping(), cpu, [low, high])


@pytest.mark.parametrize("given", [{"layers": 1, "kv_dtype": "int3"}, {"layers": 1, "kv_dtype": 5}])
def test_a_group_s_kv_dtype_is_a_dtype(given) -> None:
    with pytest.raises(InvalidInput, match="kv_dtype: expected one of bfloat16"):
        Request(other_layers=[given])


def test_a_decision_of_groups_survives_json_and_is_checked(offer, cpu) -> None:
    cards = [offer("a", sliding_window=ANY), offer("b", rank=10, head_dim=one_of(512))]
    decision = solve(grouped(), cpu, cards, libraries=NO_LIBRARIES)
    read = Decision.from_json(decision.to_json())
    assert (read.hash, by_group(read)) == (decision.hash, ["a", "b"])
    assert not any(each.is_checked for each in (read, *read.others))
    read.check(cpu, cards, libraries=NO_LIBRARIES)
    assert read.is_checked
    with pytest.raises(InvalidInput, match="fake/b for extend and decode is offered by no plugin"):
        Decision.from_json(decision.to_json()).check(cpu, cards[:1], libraries=NO_LIBRARIES)
    data = json.loads(decision.to_json())
    data["others"] = []
    with pytest.raises(InvalidInput, match="decision"):
        Decision.from_json(json.dumps(data))
    other = replace(decision.others[0], phases=decision.phases)
    assert replace(decision, others=(other,)).hash != decision.hash


def test_latent_layers_do_not_differ() -> None:
    with pytest.raises(InvalidInput, match="other_layers: expected none"):
        grouped(kind="mla")


@pytest.mark.parametrize("given", ["2 layers", [{"layers": 0}], [{"dims": 3}], [3]])
def test_groups_that_are_none_are_refused(given) -> None:
    with pytest.raises(InvalidInput, match="other_layers"):
        Request(other_layers=given)
