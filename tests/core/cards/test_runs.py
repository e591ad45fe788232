"""What a backend was run on: the fact, and what is said of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from attnmux.core import InvalidInput, Platform
from attnmux.core.cards.proof import doubt
from attnmux.core.plugin import BackendCard, Verified

H200 = Verified(
    on="NVIDIA H200", platform="nvidia:sm90", libraries=("torch 2.11.0",), date="2026-11-21"
)
INTERPRETED = Verified(
    on="Triton's interpreter", interpreted=True, libraries=("triton 3.6.0",), date="2026-11-24"
)
COMPILED = Verified(
    on="Triton's compiler",
    platform="nvidia:sm100",
    compiled=True,
    libraries=("triton 3.8.0",),
    date="2026-11-25",
)
EMULATOR = Verified(on="acmert 3.1's functions", libraries=("torch 2.13.0",), date="2026-11-22")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"on": " "}, "verified, on: expected the name of a device or an emulator"),
        ({"on": 200}, "verified, on: expected text, got 200"),
        ({"platform": "sm90"}, "verified, platform: expected VENDOR:ARCH"),
        ({"platform": "nvidia:sm90,cuda=13.0"}, "verified, platform: expected VENDOR:ARCH"),
        ({"platform": None}, "verified, platform: expected text, got None"),
        ({"platform": "nvidia:sm90", "interpreted": True}, "verified, platform: expected nothing"),
        ({"compiled": 1}, "verified, compiled: expected true or false, got 1"),
        ({"compiled": True}, "verified, platform: expected that which was compiled for, got ''"),
        (
            {"compiled": True, "platform": "nvidia:sm90", "cases": 3},
            "verified, cases: expected 0 if the kernels only compiled, got 3",
        ),
        ({"interpreted": "yes"}, "verified, interpreted: expected true or false, got 'yes'"),
        ({"cases": -1}, "verified, cases: expected a whole number, 0 or more, got -1"),
        ({"libraries": "torch 2.11"}, "verified, libraries: expected a tuple of text"),
        ({"libraries": (2.11,)}, "verified, libraries: expected a tuple of text"),
        ({"phases": "verify"}, "verified, phases: expected a tuple of phases"),
        ({"date": "yesterday"}, "verified, date: expected a day"),
        ({"date": 20261121}, "verified, date: expected text, got 20261121"),
    ],
)
def test_invalid_runs_are_refused(given, said) -> None:
    plain = {"on": "a device", "libraries": (), "date": "2026-11-21"}
    with pytest.raises(InvalidInput) as caught:
        Verified(**{**plain, **given})
    assert said in str(caught.value)


@pytest.mark.parametrize("runs", [[H200], "NVIDIA H200", ("NVIDIA H200",), H200])
def test_a_card_takes_runs_alone(runs) -> None:
    with pytest.raises(InvalidInput, match="verified_on: expected a tuple of Verified"):
        BackendCard(name="x", summary="", clauses=(), factory="a:b", verified_on=runs)


def test_doubt_is_about_the_kind_of_device() -> None:
    assert doubt((EMULATOR, H200), Platform.parse("nvidia:sm90,cuda=13.0")) == ""
    elsewhere = Platform.parse("nvidia:sm100,cuda=13.0")
    assert doubt((H200,), elsewhere) == (
        "it has never run on nvidia:sm100, only on NVIDIA H200 (torch 2.11.0, 2026-11-21)"
    )
    assert doubt((EMULATOR,), elsewhere).startswith(
        "it has never run on nvidia:sm100, only on an emulator of acmert 3.1's functions"
    )
    assert doubt((), elsewhere) == "its card names no machine that it ran on"


def test_doubt_names_the_compiler_of_kernels_that_only_compile() -> None:
    here, elsewhere = Platform.parse("nvidia:sm100"), Platform.parse("nvidia:sm103")
    compiles = "; its kernels compile for nvidia:sm100 (triton 3.8.0)"
    said = "it has never run on nvidia:sm100, only on NVIDIA H200 (torch 2.11.0, 2026-11-21)"
    assert doubt((H200, COMPILED), here) == said + compiles
    assert doubt((H200, COMPILED), elsewhere) == doubt((H200,), elsewhere)
    assert doubt((COMPILED,), here) == f"its card names no machine that it ran on{compiles}"
    prompts = replace(COMPILED, phases=("extend",))
    assert doubt((H200, prompts), here, ("extend",)) == said + compiles
    assert doubt((H200, prompts), here, ("extend", "decode")) == said
    assert doubt((H200, COMPILED), Platform.parse("nvidia:sm90")) == ""


def test_as_json() -> None:
    assert H200.to_dict() == {
        "on": "NVIDIA H200",
        "platform": "nvidia:sm90",
        "interpreted": False,
        "compiled": False,
        "emulated": False,
        "libraries": ["torch 2.11.0"],
        "date": "2026-11-21",
        "cases": 0,
        "phases": [],
        "kinds": [],
    }
    assert EMULATOR.to_dict()["emulated"] is True
    assert INTERPRETED.to_dict()["emulated"] is False
    assert COMPILED.to_dict()["emulated"] is False


def test_doubt_is_about_the_phases_that_are_asked_for() -> None:
    here = Platform.parse("nvidia:sm90,cuda=13.0")
    prompts = replace(H200, phases=("extend", "decode"))
    assert doubt((prompts,), here, ("extend",)) == ""
    said = "it has never run for verify on nvidia:sm90, "
    assert doubt((prompts,), here, ("decode", "verify")) == f"{said}nor elsewhere"
    assert doubt((prompts, INTERPRETED), here, ("decode", "verify")) == (
        f"{said}only on Triton's interpreter (triton 3.6.0, 2026-11-24)"
    )
    drafts = replace(H200, phases=("verify",))
    assert doubt((prompts, drafts), here, ("decode", "verify")) == ""
    elsewhere = Platform.parse("nvidia:sm100,cuda=13.0")
    assert doubt((prompts,), elsewhere, ("verify",)) == (
        "it has never run on nvidia:sm100, only on NVIDIA H200 (torch 2.11.0, 2026-11-21)"
    )
