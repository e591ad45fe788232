"""How a backend was proven, in one word."""

from __future__ import annotations

from dataclasses import replace

import pytest

from attnmux.core import Platform
from attnmux.core.cards.proof import doubt
from attnmux.core.plugin import ANY, Clause, Verified, one_of, versions
from attnmux.core.verbs import Proven

H200 = Verified(on="NVIDIA H200", platform="nvidia:sm90", libraries=(), date="2026-11-21")
LATER = replace(H200, on="NVIDIA H100", date="2026-11-23")
INTERPRETED = Verified(on="Triton's interpreter", interpreted=True, libraries=(), date="2026-11-24")
EMULATED = Verified(on="acmert 3.1's functions", libraries=(), date="2026-11-22")
COMPILED = Verified(
    on="Triton's compiler", platform="nvidia:sm86", compiled=True, libraries=(), date="2026-11-25"
)
M2 = Verified(on="Acme M2", platform="acme:m2", libraries=(), date="2026-11-20")

AXES = ("phase", "kind", "dtype", "kv_dtype", "page_size", "head_dim")


def clause(**conditions: object) -> Clause:
    return Clause(**{"vendor": ANY, **dict.fromkeys(AXES, ANY), **conditions})


NVIDIA = clause(vendor=one_of("nvidia"))


@pytest.mark.parametrize(
    ("runs", "clauses", "said"),
    [
        ((), (NVIDIA,), "nothing"),
        ((EMULATED,), (NVIDIA,), "emulated (2026-11-22)"),
        ((EMULATED, INTERPRETED), (NVIDIA,), "interpreted (2026-11-24)"),
        ((EMULATED, H200), (NVIDIA,), "hardware: NVIDIA H200 (2026-11-21)"),
        ((LATER, H200), (NVIDIA,), "hardware: NVIDIA H100, NVIDIA H200 (2026-11-23)"),
        ((INTERPRETED, H200), (clause(vendor=one_of("amd")),), "other device: NVIDIA H200 "),
        ((H200,), (clause(version=versions(">=10")),), "other device: NVIDIA H200 (2026-11-21)"),
        ((H200,), (clause(version=versions(">=10")), NVIDIA), "hardware: NVIDIA H200 "),
        ((H200,), (clause(arch=one_of("sm100")),), "other device: NVIDIA H200 "),
        ((EMULATED, COMPILED), (NVIDIA,), "compiled (2026-11-25)"),
        ((H200, COMPILED), (NVIDIA,), "hardware: NVIDIA H200 (2026-11-21)"),
        # The name of a device that is not in the table of vendors tells no version
        ((M2,), (clause(vendor=one_of("acme"), version=versions(">=2")),), "hardware: Acme M2 "),
    ],
)
def test_the_word_is_that_of_the_strongest_run(runs, clauses, said) -> None:
    found = Proven.of(runs, clauses)
    assert str(found).startswith(said)
    assert said.startswith(found.word)
    assert {run for _, run in found.runs} == set(runs)
    assert [word for word, _ in found.runs] == sorted(
        (word for word, _ in found.runs), key=Proven.WORDS.index
    )


def test_on_one_machine_only_its_own_kind_of_device_is_hardware() -> None:
    sm90, sm100 = (Platform.parse(f"nvidia:{arch},cuda=13.0") for arch in ("sm90", "sm100"))
    assert Proven.on((EMULATED, H200), sm90).word == "hardware"
    assert Proven.on((EMULATED, H200), sm100).word == "other device"
    assert Proven.on((EMULATED,), sm100).word == "emulated"
    assert Proven.on((), sm100).word == "nothing"
    assert Proven.on((H200,), sm100).is_on_a_device
    assert not Proven.on((INTERPRETED,), sm100).is_on_a_device


def test_kernels_that_compile_prove_their_own_chip_alone() -> None:
    sm86, sm89 = Platform.parse("nvidia:sm86"), Platform.parse("nvidia:sm89")
    assert Proven.on((EMULATED, H200, COMPILED), sm86).word == "compiled"
    assert Proven.on((EMULATED, H200, COMPILED), sm89).word == "other device"
    assert Proven.on((COMPILED,), sm89).word == "nothing"
    assert Proven.on((COMPILED, replace(H200, platform="nvidia:sm86")), sm86).word == "hardware"
    assert Proven.of((COMPILED,), (clause(arch=one_of("sm89")),)).word == "nothing"
    # What ran elsewhere is still said
    assert Proven.on((H200, COMPILED), sm86).devices == "NVIDIA H200"
    assert Proven.on((H200, COMPILED), sm86).is_on_a_device
    assert not Proven.on((COMPILED,), sm86).is_on_a_device


def test_a_run_of_some_phases_proves_no_others() -> None:
    sm90 = Platform.parse("nvidia:sm90,cuda=13.0")
    prompts = replace(H200, phases=("extend", "decode"))
    assert Proven.on((prompts,), sm90).word == "hardware"
    assert Proven.on((prompts,), sm90, ("decode",)).word == "hardware"
    assert Proven.on((prompts, INTERPRETED), sm90, ("decode", "verify")).word == "interpreted"
    assert Proven.on((prompts, H200), sm90, ("verify",)).word == "hardware"
    said = "hardware: NVIDIA H200 (2026-11-21), extend and decode alone"
    assert str(Proven.of((prompts,), (NVIDIA,))) == said
    all_but_drafts = replace(H200, phases=("extend", "decode", "verify"))
    said = "hardware: NVIDIA H200 (2026-11-21), extend, decode and verify alone"
    assert str(Proven.of((all_but_drafts,), (NVIDIA,))) == said
    assert str(Proven.of((prompts, H200), (NVIDIA,))) == "hardware: NVIDIA H200 (2026-11-21)"


def test_a_run_of_some_kinds_of_layers_proves_those_alone() -> None:
    sm90 = Platform.parse("nvidia:sm90,cuda=13.0")
    some = replace(H200, kinds=("gdn", "kda"))
    runs = (some, replace(INTERPRETED, kinds=("mamba1",)))
    assert Proven.of(runs, (NVIDIA,)).word == "hardware"
    assert str(Proven.of(runs, (NVIDIA,), "gdn")) == "hardware: NVIDIA H200 (2026-11-21)"
    assert str(Proven.of(runs, (NVIDIA,), "mamba1")) == "interpreted (2026-11-24)"
    assert Proven.on(runs, sm90, ["decode"], "kda").word == "hardware"
    assert Proven.on(runs, sm90, ["decode"], "mamba1").word == "interpreted"
    assert Proven.on(runs, sm90, ["decode"]).word == "hardware"
    assert (
        Proven.on((replace(some, phases=("extend",)),), sm90, ["decode"], "gdn").word == "nothing"
    )


def test_a_kind_that_never_ran_is_doubted() -> None:
    sm90 = Platform.parse("nvidia:sm90,cuda=13.0")
    runs = (replace(H200, kinds=("gdn",)), replace(INTERPRETED, kinds=("mamba1",)))
    assert doubt(runs, sm90, ["decode"], "gdn") == ""
    said = doubt(runs, sm90, ["decode"], "mamba1")
    assert said.startswith("it has never run for mamba1 on nvidia:sm90, only on Triton's interpret")
    said = doubt((replace(H200, kinds=("gdn",), phases=("extend",)),), sm90, ["decode"], "gdn")
    assert said.startswith("it has never run for decode on nvidia:sm90")
