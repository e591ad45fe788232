"""The tables for people."""

from __future__ import annotations

from dataclasses import replace

from attnmux.core import Offer, Platform, Policy, Request, solve
from attnmux.core.cli.here import backends_here
from attnmux.core.cli.outcomes import outcomes
from attnmux.core.cli.render import render_backends, render_decision
from attnmux.core.cli.select_explained import Explanation
from attnmux.core.plugin import ANY, BackendCard, Clause, Verified, one_of

CPU, H200 = Platform.parse("cpu:x86_64"), Platform.parse("nvidia:sm90,cuda=13.0")
AXES = ("vendor", "phase", "kind", "dtype", "kv_dtype", "page_size", "head_dim")


def offer(name: str, **card: object) -> Offer:
    clauses = (Clause(**dict.fromkeys(AXES, ANY)),)
    card.setdefault("factory", "a:b")
    made = BackendCard(name=name, summary=":smile:", clauses=clauses, **card)
    return Offer(card=made, plugin="fake", distribution="attnmux-fake")


def test_brackets_are_no_markup(capsys) -> None:
    """Without its extra, the pip line would install nothing new."""
    lacking = offer("lacking", requires=("torch>=2",), extra="torch")
    cards = [offer("a"), lacking]
    decision = solve(Request(), Platform.parse("cpu:x86_64"), cards, libraries={}.get)
    told = outcomes(decision, cards, Policy())
    explanation = Explanation(outcomes=told, values=(), doubts=())
    render_decision(decision, explanation, explain=True, every=True)
    render_backends(backends_here([lacking], Policy(), [CPU], libraries={}.get), every=True)
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("'attnmux-fake[torch]'") == 2
    assert ":smile:" in said


def test_a_backend_says_how_it_was_proven(capsys) -> None:
    emulator = Verified(on="a library", libraries=(), date="2026-11-21")
    device = Verified(on="H200", platform="nvidia:sm90", libraries=(), date="2026-11-21")
    compiler = replace(device, on="a compiler", platform="nvidia:sm86", compiled=True)
    shown = [
        offer("emulated", verified_on=(emulator,)),
        offer("real", verified_on=(device, compiler)),
        offer("built", verified_on=(compiler, emulator)),
    ]

    def words(*devices: Platform) -> list[str]:
        render_backends(backends_here(shown, Policy(), devices), every=True)
        _, *rows = capsys.readouterr().out.splitlines()
        here = "ready" if devices else "other hardware"
        return [row.partition(" ")[2].partition(here)[0].strip() for row in rows]

    assert words() == ["emulated", "hardware", "compiled"]
    assert words(H200) == ["emulated", "hardware", "emulated"]
    assert words(Platform.parse("nvidia:sm86"), CPU) == ["emulated", "compiled", "compiled"]
    assert words(CPU) == ["emulated", "other device", "emulated"]


def test_backends_for_other_hardware_are_one_line(capsys) -> None:
    clauses = (Clause(**{**dict.fromkeys(AXES, ANY), "vendor": one_of("nvidia")}),)
    card = BackendCard(name="there", summary="s", clauses=clauses, factory="a:b")
    there = Offer(card=card, plugin="fake", distribution="attnmux-fake")
    found = backends_here([offer("here"), there], Policy(), [CPU])
    render_backends(found)
    _, row, blank, last = capsys.readouterr().out.splitlines()
    assert row.startswith("fake/here ")
    assert (blank, last) == ("", "for other hardware (--all): fake/there")
    render_backends(found, every=True)
    assert "\nfake/there " in capsys.readouterr().out
