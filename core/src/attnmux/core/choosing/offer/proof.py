"""How a backend was proven, in one word, by the runs on its card."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from attnmux.core.choosing.machine.vendors import VENDORS

if TYPE_CHECKING:
    from attnmux.core.choosing.machine.platform import Platform
    from attnmux.core.choosing.offer.clause import Clause
    from attnmux.core.choosing.offer.verified import Verified

Proof = Literal["hardware", "other device", "interpreted", "emulated", "nothing"]
"""What ran, the strongest first: the backend on a device that it serves; on another device alone;
the library's kernels in an interpreter; a stand-in of the library; nothing that the card names."""

PROOFS: tuple[Proof, ...] = get_args(Proof)
ON_A_DEVICE: tuple[Proof, ...] = ("hardware", "other device")


@dataclass(frozen=True, kw_only=True, slots=True)
class Proven:
    """The runs of a card, each with what it proves, the strongest first."""

    runs: tuple[tuple[Proof, Verified], ...]

    @property
    def word(self) -> Proof:
        """The strongest proof."""
        return self.runs[0][0] if self.runs else PROOFS[-1]

    @property
    def is_on_a_device(self) -> bool:
        return self.word in ON_A_DEVICE

    @property
    def devices(self) -> str:
        """Where the strongest runs were, each once: "NVIDIA H200"."""
        return ", ".join(dict.fromkeys(str(run) for word, run in self.runs if word == self.word))

    def __str__(self) -> str:
        """The word, the devices and the last day: "hardware: NVIDIA H200 (2026-11-22)"."""
        if not self.runs:
            return self.word
        day = max(run.date for word, run in self.runs if word == self.word)
        where = f": {self.devices}" if self.is_on_a_device else ""
        return f"{self.word}{where} ({day})"


def proven(runs: Sequence[Verified], clauses: Sequence[Clause]) -> Proven:
    """The proof for all machines that the clauses serve."""
    return _ordered(runs, lambda run: any(_serves(clause, run) for clause in clauses))


def proven_on(runs: Sequence[Verified], platform: Platform) -> Proven:
    """The proof for one machine: a run on another kind of device is one on another device."""
    kind = f"{platform.vendor}:{platform.arch}"
    return _ordered(runs, lambda run: run.platform == kind)


def _ordered(runs: Sequence[Verified], is_own: Callable[[Verified], bool]) -> Proven:
    each = [(_word(run, is_own), run) for run in runs]
    return Proven(runs=tuple(sorted(each, key=lambda one: PROOFS.index(one[0]))))


def _word(run: Verified, is_own: Callable[[Verified], bool]) -> Proof:
    if run.platform:
        return "hardware" if is_own(run) else "other device"
    return "emulated" if run.emulated else "interpreted"


def _serves(clause: Clause, run: Verified) -> bool:
    """Whether the clause admits the run's device. A version that the name does not tell, as of a
    vendor outside the table, is taken to fit."""
    version = _version(run)
    return (
        clause.vendor.admits(run.vendor)
        and clause.arch.admits(run.arch)
        and (not version or clause.version.admits(version))
    )


def _version(run: Verified) -> str:
    row = VENDORS.get(run.vendor)
    match = None if row is None else re.fullmatch(row.arch, run.arch, re.ASCII)
    return "" if row is None or match is None else ".".join(map(str, row.version(match[1])))
