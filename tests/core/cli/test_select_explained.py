"""`attnmux select --explain`: who won and why, who lost and why, who set each value."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from attnmux.core import Decision, Offer
from attnmux.core.cli import run as shared
from attnmux.core.cli.verbs import verbs
from attnmux.core.plugin import (
    ANY,
    BackendCard,
    Clause,
    Condition,
    Option,
    Prior,
    Verified,
    includes,
    one_of,
)

MODELS = Path(__file__).parents[1] / "data"
HERE = "cpu:x86_64,features=avx2"
LONG = "a kernel that was measured on many machines and found to be good on every one of them"


def card(name: str, rank: int, **given: object) -> BackendCard:
    conditions: dict[str, Condition] = {
        "vendor": ANY,
        "phase": one_of("extend", "decode", "verify", "draft"),
        "kind": one_of("mha"),
        "dtype": one_of("bfloat16"),
        "kv_dtype": one_of("bfloat16"),
        "page_size": ANY,
        "head_dim": ANY,
        "spec_topk": ANY,
        **{key: value for key, value in given.items() if isinstance(value, Condition)},
    }
    more = {key: value for key, value in given.items() if not isinstance(value, Condition)}
    return BackendCard(
        name=name,
        summary=name,
        factory="a:b",
        clauses=(Clause(**conditions),),
        priors=(Prior(rank=rank, source=LONG),),
        **more,
    )


CARDS = (
    card("best", 10, page_size=one_of(64), options=(Option(name="tile", type=int, default=8),)),
    card("second", 20),
    card("small_pages_only", 5, phase=one_of("extend"), page_size=one_of(16)),
    card("other_machine_other_kind", 1, vendor=one_of("acme"), kind=one_of("mla")),
)


@pytest.fixture
def call(monkeypatch):
    class Given:
        loaded = (None,)
        failures = ()

        def offers(self) -> tuple[Offer, ...]:
            return tuple(
                Offer(card=each, plugin="fake", distribution="attnmux-fake", version="1")
                for each in CARDS
            )

    monkeypatch.setattr(shared.Plugins, "load", lambda **_: Given())

    def invoke(*args: str):
        given = ["select", "--platform", HERE, *args]
        return CliRunner().invoke(verbs, given, prog_name="attnmux")

    return invoke


def words(text: str) -> str:
    return " ".join(text.split())


def explanation(result) -> dict:
    return json.loads(result.stdout)["explanation"]


def test_the_plain_answer_is_short(call) -> None:
    result = call()
    assert result.exit_code == 0
    said = words(result.stdout)
    assert said.startswith("best (fake) serves extend and decode")
    assert "chosen: best rank of 2 that fit" in said
    assert "fits, ranked after best" in said
    assert "2 more do not fit: --explain says why" in said
    assert "small_pages_only" not in said
    assert len(result.stdout.splitlines()) <= 12


def test_explained(call) -> None:
    result = call("--explain")
    assert result.exit_code == 0
    said = words(result.stdout)
    assert f"best rank of 2 that fit with page size 64, KV in bfloat16 ({LONG})" in said
    assert "but not at the decided page size 64: page_size: asked for 64, serves" in said
    assert "for other hardware (--all): other_machine_other_kind" in said
    assert "kind: asked for mha, serves mla" not in said
    assert "page_size default 64 (decided with the backends)" in said
    assert "best.tile default 8 (the card's)" in said
    lines = result.stdout.splitlines()
    (row,) = [line for line in lines if "not at the decided page size" in line]
    assert "small_pages_only" in row
    assert lines == [line.rstrip() for line in lines]


def test_one_backend_is_explained_with_every_reason(call) -> None:
    said = words(call("--explain", "other_machine_other_kind").stdout)
    assert "vendor: needs acme, this is cpu kind: asked for mha, serves mla" in said
    assert "small_pages_only" not in said
    unknown = call("--explain", "other_machine")
    assert unknown.exit_code == 2
    assert "other_machine" in unknown.stderr
    told = json.loads(call("--explain", "best", "--json").stdout)["explanation"]
    assert {outcome["backend"] for outcome in told["outcomes"]} == {"best"}


def test_what_the_winner_was_never_run_on(call, monkeypatch) -> None:
    """One line, of an available winner; none where its card names such a device."""
    where = {"libraries": ("lib 1.0",), "date": "2026-11-21"}
    emulator = Verified(on="lib 1.0's functions", **where)
    silent = "best: its card names no machine that it ran on"
    emulated = (
        "best: it has never run on cpu:x86_64, only on an emulator of lib 1.0's functions "
        "(lib 1.0, 2026-11-21)"
    )
    here = Verified(on="a laptop", platform="cpu:x86_64", **where)
    cases = (((), [silent]), ((emulator,), [emulated]), ((emulator, here), []))
    for runs, doubts in cases:
        given = (replace(CARDS[0], verified_on=runs), *CARDS[1:])
        monkeypatch.setitem(globals(), "CARDS", given)
        assert explanation(call("--explain", "--json"))["doubts"] == doubts
        said = words(call("--explain").stdout)
        assert [line for line in (silent, emulated) if line in said] == doubts
        assert "never run on" not in words(call().stdout)


WHERE = {"libraries": ("lib 1.0",), "date": "2026-11-21"}
RAN = Verified(on="a laptop", platform="cpu:x86_64", **WHERE)
ELSEWHERE = Verified(on="NVIDIA H200", platform="nvidia:sm90", **WHERE)
INTERPRETED = Verified(on="Triton's interpreter", interpreted=True, **WHERE)
EMULATED = Verified(on="lib 1.0's functions", **WHERE)
PROOFS = (
    ((RAN, EMULATED), "hardware"),
    ((ELSEWHERE, EMULATED), "other device"),
    ((INTERPRETED, EMULATED), "interpreted"),
    ((EMULATED,), "emulated"),
    ((), "nothing"),
    ((replace(RAN, phases=("extend", "decode")),), "hardware"),
    ((replace(RAN, phases=("verify",)), EMULATED), "emulated"),
)


@pytest.mark.parametrize(("runs", "word"), PROOFS)
def test_every_answer_says_how_a_backend_was_proven(call, monkeypatch, runs, word) -> None:
    given = (replace(CARDS[0], verified_on=runs), replace(CARDS[1], verified_on=(RAN,)))
    monkeypatch.setitem(globals(), "CARDS", given)
    for how in ((), ("--explain",), ("--all",)):
        said = words(call(*how).stdout)
        assert f"best fake 10 {word} " in said
        assert "second fake 20 hardware " in said
    assert json.loads(call("--json").stdout)["proof"] == {
        "fake/best": word,
        "fake/second": "hardware",
    }
    told = explanation(call("--explain", "--json"))["outcomes"]
    assert [each["proof"] for each in told] == [word, "hardware"]


@pytest.mark.parametrize(("runs", "word"), PROOFS)
def test_a_rank_over_a_backend_that_ran_on_a_device_is_told(call, monkeypatch, runs, word) -> None:
    given = (replace(CARDS[0], verified_on=runs), replace(CARDS[1], verified_on=(RAN,)))
    monkeypatch.setitem(globals(), "CARDS", given)
    line = "; it ranks above second (a laptop), which ran on a device"
    is_told = word in ("interpreted", "emulated", "nothing")
    plain, in_full = call("--json"), call("--explain", "--json")
    assert (line in plain.stderr) == is_told
    assert (line in "".join(json.loads(plain.stdout)["warnings"])) == is_told
    assert (line in "".join(explanation(in_full)["doubts"])) == is_told
    assert (line in words(call("--explain").stdout)) == is_told
    # A backend that the user names is the user's choice, and one that does not fit none at all
    assert line not in call("--backend", "best").stderr
    monkeypatch.setitem(globals(), "CARDS", (given[0], replace(given[1], clauses=())))
    assert "it ranks above" not in call().stderr


def test_several_machines_say_which_winner_ran_on_none_of_their_kind(call, monkeypatch) -> None:
    given = (replace(CARDS[0], verified_on=(RAN,)),)
    monkeypatch.setitem(globals(), "CARDS", given)
    result = call("--platform", "nvidia:sm90,cuda=13.0", "--request", "graph=no")
    assert [line.split()[-1] for line in result.stdout.splitlines()[1:]] == ["bfloat16", "device"]
    assert "best: other device" in words(result.stdout)
    both = json.loads(call("--platform", "nvidia:sm90,cuda=13.0", "--json").stdout)["machines"]
    words_of = [machine["proof"]["fake/best"] for machine in both]
    assert words_of == ["hardware", "other device"]


def test_what_a_compiler_would_add(call, monkeypatch) -> None:
    given = (*CARDS, card("compiled", 1, features=includes("cxx_compiler")))
    monkeypatch.setitem(globals(), "CARDS", given)
    line = (
        "compiled: compiled at first use, and the machine has no C++ compiler (c++, g++, clang++)"
    )
    assert f"{line}: apt-get install g++" in words(call("--explain").stdout)
    monkeypatch.setitem(globals(), "HERE", f"{HERE}+cxx_compiler")
    there = call("--explain").stdout
    assert "apt-get" not in there
    assert words(there).startswith("compiled (fake)")


def test_all_reasons(call) -> None:
    said = words(call("--all").stdout)
    assert "vendor: needs acme, this is cpu kind: asked for mha, serves mla" in said
    assert "--all" not in said


@pytest.mark.parametrize("args", [(), ("--explain",), ("--all",), ("--all", "--backend", "best")])
@pytest.mark.parametrize("columns", [30, 60, 100, 200])
def test_any_terminal(call, monkeypatch, columns, args) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("FORCE_COLOR", "1")
    lines = click.unstyle(call("--request", "page_size=64,spec_topk=4", *args).stdout).splitlines()
    assert max(map(len, lines)) <= columns
    said = words("\n".join(lines))
    if args:
        # Words stay whole
        for word in ("small_pages_only", "other_machine_other_kind", "measured", "verify"):
            assert word in said
        assert ("this is cpu" in said) == ("--all" in args)


def test_who_set_each_value(call, tmp_path, monkeypatch) -> None:
    file = tmp_path / "attnmux.toml"
    file.write_text('prefer_backends = ["second"]\n[options.best]\ntile = 4\n')
    monkeypatch.setenv("ATTNMUX_DECODE_BACKEND", "best")
    model = str(MODELS / "llama-3.1-8b")
    result = call(
        *("--explain", "--json", "--model", model, "--tp", "2", "--allow-coercion"),
        *("--request", "dtype=bf16"),
    )
    values = {each["name"]: each for each in explanation(result)["values"]}
    assert set(values["dtype"]) == {"name", "value", "origin", "source"}

    def origin(name: str) -> tuple[str, str, str]:
        return values[name]["value"], values[name]["origin"], values[name]["source"]

    assert origin("platform") == (HERE, "user", "command line")
    assert origin("dtype") == ("bfloat16", "user", "command line")
    assert origin("head_dim") == ("128", "model", model)
    assert origin("num_q_heads") == ("16", "model", f"{model}, over 2 ranks")
    assert origin("kv_dtype") == ("bfloat16", "default", "as dtype")
    assert origin("page_size") == ("64", "default", "decided with the backends")
    assert origin("decode_backend") == ("best", "env", "ATTNMUX_DECODE_BACKEND")
    assert origin("prefer_backends") == ("second", "config", str(file))
    assert origin("allow_coercion") == ("yes", "user", "command line")
    assert origin("best.tile") == ("4", "config", str(file))
    assert "deny_backends" not in values
    again = explanation(call("--explain", "--json", "--set", "best.tile=2"))["values"]
    (tile,) = [each for each in again if each["name"] == "best.tile"]
    assert (tile["value"], tile["origin"]) == ("2", "user")


def test_json_carries_the_same_facts(call) -> None:
    result = call("--explain", "--json")
    data = json.loads(result.stdout)
    assert Decision.from_json(result.stdout).hash == data["hash"]
    told = {(each["backend"], *each["phases"]): each for each in explanation(result)["outcomes"]}
    assert told["best", "decode"]["standing"] == told["best", "extend"]["standing"] == "chosen"
    assert told["best", "decode"]["source"] == LONG
    elsewhere = told["small_pages_only", "extend"]
    assert elsewhere["standing"] == "elsewhere"
    assert [reason["code"] for reason in elsewhere["reasons"]] == ["PAGE_SIZE"]
    other = told["other_machine_other_kind", "extend", "decode"]
    assert [reason["code"] for reason in other["reasons"]] == ["VENDOR", "KIND"]
    assert "explanation" not in json.loads(call("--json").stdout)


def test_coercions_are_told(call) -> None:
    result = call("--explain", "--request", "page_size=48", "--backend", "best", "--allow-coercion")
    said = words(result.stdout)
    assert "page_size: 48 (user) became 64: best for" in said
    assert "named by user: backend=best" in said
    assert "fits, but best was named" in said


def test_a_refusal_is_explained_too(call) -> None:
    args = ("--request", "kind=nsa,page_size=64")
    result = call("--explain", *args)
    assert result.exit_code == 3
    said = words(result.stdout)
    assert "best fake nothing kind: asked for nsa, serves mha" in said
    assert "page_size user 64 (command line)" in said
    assert result.stderr.splitlines()[-1] == (
        f"attnmux: no attention backend serves extend, decode on {HERE}"
    )
    assert "wanted" not in result.stderr
    plain = call(*args)
    assert plain.stdout == ""
    assert "best (fake) for extend, decode: kind: asked for nsa, serves mha" in plain.stderr
    data = json.loads(call("--explain", "--json", *args).stdout)
    assert data["hash"] is None
    assert {each["standing"] for each in data["explanation"]["outcomes"]} == {"rejected"}


def test_decode_that_no_backend_captures_runs_eagerly_and_says_so(call) -> None:
    machine = ("--platform", "nvidia:sm90,cuda=13.0")
    told = json.loads(call(*machine, "--json").stdout)["machines"]
    assert [one["coercions"] for one in told] == [[], []]
    assert [note for one in told for note in one["notes"]] == [
        "decode runs eagerly, without device graphs: best for decode offers graph none"
    ]
    # A user who asks for graphs gets them or an error
    assert call(*machine, "--request", "graph=yes").exit_code == 3
