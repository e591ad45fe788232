"""The hardware or emulator that a backend has run on: a card's `verified_on`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from attnmux.core.choosing.common.checks import TEXT, Check, check_fields, refusal, several
from attnmux.core.choosing.common.facts import dataclass
from attnmux.core.choosing.machine.platform import Platform

PLATFORM = r"[^:,\s]+:[^:,\s]+"

CHECKS: Mapping[str, Check] = {
    **dict.fromkeys(("on", "platform", "date"), TEXT),
    "libraries": several('a tuple of text, such as ("torch 2.11",)', tuple, str),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Verified:
    """A run of the conformance suite that the backend passed.

    Raises InvalidInput for a field of another type, an empty `on`, a platform that is not
    VENDOR:ARCH, and a date that does not exist.
    """

    on: str
    """The name of the device ("NVIDIA H200"), or of the emulator, with the functions that it
    emulates."""
    platform: str = ""
    """Vendor and architecture of the device, as a Platform writes them: "nvidia:sm90". Empty for an
    emulator of the vendor's functions, which proves nothing about the hardware."""
    libraries: tuple[str, ...]
    """With their versions; for an emulator, also the one whose signatures it was compared with."""
    date: str
    """The day of the run, as 2026-11-21."""

    def __post_init__(self) -> None:
        check_fields("verified", self, CHECKS)
        if not self.on.strip():
            raise refusal("verified, on", self.on, "the name of a device or an emulator")
        if self.platform and not re.fullmatch(PLATFORM, self.platform):
            expected = "VENDOR:ARCH, or nothing for an emulator"
            raise refusal("verified, platform", self.platform, expected)
        from datetime import date  # noqa: PLC0415  # off the path of cards that were checked

        try:
            date.fromisoformat(self.date)
        except ValueError:
            raise refusal("verified, date", self.date, "a day, such as 2026-11-21") from None

    @property
    def emulated(self) -> bool:
        """Whether the run used no device."""
        return not self.platform

    @property
    def vendor(self) -> str:
        """As in `Platform`; empty for an emulator."""
        return self.platform.partition(":")[0]

    def __str__(self) -> str:
        return f"an emulator of {self.on}" if self.emulated else self.on

    def to_dict(self) -> dict[str, Any]:
        return {
            "on": self.on,
            "platform": self.platform,
            "emulated": self.emulated,
            "libraries": list(self.libraries),
            "date": self.date,
        }


def emulated_alone(runs: Sequence[Verified]) -> bool:
    """Whether there were runs, none of them on hardware."""
    return bool(runs) and all(run.emulated for run in runs)


def hardware(runs: Sequence[Verified]) -> str:
    """The devices, each once; "an emulator alone" where there was none; empty without runs."""
    if emulated_alone(runs):
        return "an emulator alone"
    return ", ".join(dict.fromkeys(run.on for run in runs if not run.emulated))


def doubt(runs: Sequence[Verified], platform: Platform) -> str:
    """A warning where no run was on the platform's kind of device; else empty."""
    kind = f"{platform.vendor}:{platform.arch}"
    if any(run.platform == kind for run in runs):
        return ""
    if not runs:
        return "its card names no machine that it was run on"
    tried = "; ".join(
        dict.fromkeys(f"{run} ({', '.join((*run.libraries, run.date))})" for run in runs)
    )
    return f"never run on {kind}, only on {tried}"
