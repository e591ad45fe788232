"""Proof of a backend: the runs and the bounds that its card names, and the proof in one word."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Annotated, Any, ClassVar, Literal, get_args

from attnmux.core.cards.clause import Clause
from attnmux.core.cards.conditions import ANY, Condition
from attnmux.core.facts.checks import refusal
from attnmux.core.facts.fields import Check, Name, Positive, Whole, read_fields
from attnmux.core.facts.frozen import Plain, plain_fields
from attnmux.core.facts.platform import Platform
from attnmux.core.facts.vendors import VENDORS

PLATFORM = r"[^:,\s]+:[^:,\s]+"


@dataclass(frozen=True, kw_only=True, slots=True)
class Verified(Plain):
    """A run of the conformance suite that the backend passed, or kernels that compiled.

    Raises InvalidInput for a field of another type, an empty `on`, a platform that is not
    VENDOR:ARCH, an interpreted run with a platform, compiled kernels without one or with cases,
    and a date that does not exist.
    """

    on: str
    """The name of the device ("NVIDIA H200"), of the interpreter ("Triton's interpreter"), of the
    compiler ("Triton's compiler"), or of the functions that an emulator stands in for."""
    platform: str = ""
    """Vendor and architecture of the device, as a Platform writes them: "nvidia:sm90". Empty if
    no device ran the kernels and none was compiled for."""
    interpreted: bool = False
    """Whether an interpreter ran the library's own kernels. Without it and without a platform, an
    emulator ran in their place."""
    compiled: bool = False
    """Whether the kernels compiled for the platform and fit its shared memory, and nothing ran."""
    libraries: Annotated[tuple[str, ...], Check('a tuple of text, such as ("torch 2.11",)')]
    """With their versions; for an emulator, also the one whose signatures it was compared with."""
    date: str
    """The day of the run, as 2026-11-21."""
    cases: Whole = 0
    """Cases of the suite that agreed, eagerly and from graphs; 0 if they were not counted."""
    phases: Annotated[
        tuple[str, ...], Check('a tuple of phases, such as ("extend", "decode")')
    ] = ()
    """The phases that ran, if the card has got others since; empty for all of the card."""
    kinds: Annotated[
        tuple[str, ...], Check('a tuple of kinds of layers, such as ("mha", "mla")')
    ] = ()
    """The kinds of layers that ran, in the same way."""

    def __post_init__(self) -> None:
        read_fields(self, "verified")
        if not self.on.strip():
            raise refusal("verified, on", self.on, "the name of a device or an emulator")
        if self.platform and not re.fullmatch(PLATFORM, self.platform):
            expected = "VENDOR:ARCH, or nothing for an emulator"
            raise refusal("verified, platform", self.platform, expected)
        if self.platform and self.interpreted:
            expected = "nothing if the kernels were interpreted"
            raise refusal("verified, platform", self.platform, expected)
        if self.compiled and not self.platform:
            raise refusal("verified, platform", self.platform, "that which was compiled for")
        if self.compiled and self.cases:
            raise refusal("verified, cases", self.cases, "0 if the kernels only compiled")
        try:
            date.fromisoformat(self.date)
        except ValueError:
            raise refusal("verified, date", self.date, "a day, such as 2026-11-21") from None

    @property
    def emulated(self) -> bool:
        """Whether a stand-in of the library ran, and none of its kernels."""
        return not self.platform and not self.interpreted

    def covers(self, phase: str = "", kind: str = "") -> bool:
        """Whether the phase ran, on layers of the kind; empty for any."""
        return all(
            not wanted or not ran or wanted in ran
            for wanted, ran in ((phase, self.phases), (kind, self.kinds))
        )

    def __str__(self) -> str:
        if self.compiled:
            return f"{self.on} for {self.platform}"
        return f"an emulator of {self.on}" if self.emulated else self.on

    def to_dict(self) -> dict[str, Any]:
        return {**plain_fields(self), "emulated": self.emulated}


@dataclass(frozen=True, kw_only=True, slots=True)
class ErrorBound(Plain):
    """The largest error of one query and head, up to a number of keys.

    The unit is the rounding of the output's format, eps / 2. Raises InvalidInput for a field of
    another type, and for an error, keys or a source that are 0 or empty.
    """

    max_error: Annotated[
        float, Check("a number of roundings, more than 0", lambda error: 0 < error < float("inf"))
    ]
    keys: Positive
    """The longest context that was tried."""
    kv_dtype: Annotated[Condition, Check("a condition")] = ANY
    source: Name
    """The test or the analysis that found the bound."""

    def __post_init__(self) -> None:
        read_fields(self, "error bound")

    def __str__(self) -> str:
        return f"{self.max_error:g} up to {self.keys:,} keys"


Proof = Literal["hardware", "compiled", "other device", "interpreted", "emulated", "nothing"]
"""How a backend is proven, in a word: see `Proven.WORDS`."""

ON_A_DEVICE: tuple[Proof, ...] = ("hardware", "other device")


@dataclass(frozen=True, kw_only=True, slots=True)
class Proven:
    """The runs of a card, each with its proof, the strongest first."""

    WORDS: ClassVar[tuple[Proof, ...]] = get_args(Proof)
    """The strongest first: the backend ran on a device that it serves; its kernels compile for one,
    and did not run there; it ran on another device; the library's kernels ran in an interpreter; a
    stand-in of the library ran; the card names nothing."""

    runs: tuple[tuple[Proof, Verified], ...]

    @property
    def word(self) -> Proof:
        """The strongest proof."""
        return self.runs[0][0] if self.runs else Proven.WORDS[-1]

    @property
    def is_on_a_device(self) -> bool:
        """Whether some device ran the kernels."""
        return bool(self.devices)

    @property
    def devices(self) -> str:
        """Where the strongest runs on devices were, each once: "NVIDIA H200"."""
        ran = [(word, str(run)) for word, run in self.runs if word in ON_A_DEVICE]
        return ", ".join(dict.fromkeys(name for word, name in ran if word == ran[0][0]))

    def __str__(self) -> str:
        """The word, the devices and the last day: "hardware: NVIDIA H200 (2026-11-22)"; and the
        phases, if no such run had all of the card."""
        if not self.runs:
            return self.word
        strongest = [run for word, run in self.runs if word == self.word]
        day = max(run.date for run in strongest)
        where = f": {self.devices}" if self.word in ON_A_DEVICE else ""
        *others, last = dict.fromkeys(phase for run in strongest for phase in run.phases) or [""]
        phases = f"{', '.join(others)} and {last}" if others else last
        alone = f", {phases} alone" if all(run.phases for run in strongest) else ""
        return f"{self.word}{where} ({day}){alone}"

    @staticmethod
    def of(runs: Sequence[Verified], clauses: Sequence[Clause], kind: str = "") -> Proven:
        """The proof for all machines that the clauses serve, in layers of the kind; empty for
        any."""
        covering = [run for run in runs if run.covers(kind=kind)]
        return _ordered(covering, lambda run: any(_serves(clause, run) for clause in clauses))

    @staticmethod
    def on(
        runs: Sequence[Verified], platform: Platform, phases: Sequence[str] = (), layers: str = ""
    ) -> Proven:
        """The proof for one machine: a run on another kind of device is one on another device, and
        kernels that compile for another kind prove nothing.

        phases: the requested ones; the least proven of them counts. layers: the requested kind of
        layers; empty for any.
        """
        device = f"{platform.vendor}:{platform.arch}"
        covering = [[run for run in runs if run.covers(phase, layers)] for phase in phases or [""]]
        proofs = [_ordered(some, lambda run: run.platform == device) for some in covering]
        return max(proofs, key=lambda one: Proven.WORDS.index(one.word))


def doubt(
    runs: Sequence[Verified], platform: Platform, phases: Sequence[str] = (), layers: str = ""
) -> str:
    """A warning if a phase never ran on the platform's kind of device, in layers of the kind;
    else empty. layers: empty for any."""
    proof = Proven.on(runs, platform, phases, layers)
    if proof.word == "hardware":
        return ""
    device = f"{platform.vendor}:{platform.arch}"
    compilers = [run.libraries for word, run in proof.runs if word == "compiled"]
    compiles = (
        f"; its kernels compile for {device} ({', '.join(compilers[0])})" if compilers else ""
    )
    ran = [run for run in runs if not run.compiled]
    return _never_ran(ran, platform, phases, layers) + compiles


def _never_ran(
    runs: Sequence[Verified], platform: Platform, phases: Sequence[str], layers: str
) -> str:
    """A text that says which phases never ran on such a device, and where they ran."""
    if not runs:
        return "its card names no machine that it ran on"
    what, tried = "", runs
    if Proven.on(runs, platform).word == "hardware":
        if Proven.on(runs, platform, (), layers).word == "hardware":
            doubted = [
                phase
                for phase in phases
                if Proven.on(runs, platform, [phase], layers).word != "hardware"
            ]
            what = f" for {' and '.join(doubted)}"
        else:
            doubted, what = list(phases), f" for {layers}"
        tried = [run for run in runs if all(run.covers(phase, layers) for phase in doubted or [""])]
    only = "; ".join(
        dict.fromkeys(f"{run} ({', '.join((*run.libraries, run.date))})" for run in tried)
    )
    where = f"only on {only}" if only else "nor elsewhere"
    return f"it has never run{what} on {platform.vendor}:{platform.arch}, {where}"


def _ordered(runs: Sequence[Verified], is_own: Callable[[Verified], bool]) -> Proven:
    words = [(_word(run, is_own), run) for run in runs if is_own(run) or not run.compiled]
    return Proven(runs=tuple(sorted(words, key=lambda one: Proven.WORDS.index(one[0]))))


def _word(run: Verified, is_own: Callable[[Verified], bool]) -> Proof:
    if run.compiled:
        return "compiled"
    if run.platform:
        return "hardware" if is_own(run) else "other device"
    return "emulated" if run.emulated else "interpreted"


def _serves(clause: Clause, run: Verified) -> bool:
    """Whether the clause admits the run's device. A version that the name does not state, as with a
    vendor outside the table, counts as fitting."""
    vendor, _, arch = run.platform.partition(":")
    row = VENDORS.get(vendor)
    version = "" if row is None else ".".join(map(str, row.version_of(arch) or ()))
    return (
        clause.vendor.admits(vendor)
        and clause.arch.admits(arch)
        and (not version or clause.version.admits(version))
    )
