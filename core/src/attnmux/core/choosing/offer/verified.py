"""The hardware or emulator that a backend has run on: a card's `verified_on`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from attnmux.core.choosing.common.checks import TEXT, Check, check_fields, refusal, several, whole
from attnmux.core.choosing.common.plain import Plain, plain_fields
from attnmux.core.choosing.machine.platform import Platform

PLATFORM = r"[^:,\s]+:[^:,\s]+"

CHECKS: Mapping[str, Check] = {
    **dict.fromkeys(("on", "platform", "date"), TEXT),
    "interpreted": Check("true or false", lambda value: isinstance(value, bool)),
    "cases": whole(0),
    "libraries": several('a tuple of text, such as ("torch 2.11",)', tuple, str),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Verified(Plain):
    """A run of the conformance suite that the backend passed.

    Raises InvalidInput for a field of another type, an empty `on`, a platform that is not
    VENDOR:ARCH, an interpreted run with a platform, and a date that does not exist.
    """

    on: str
    """The name of the device ("NVIDIA H200"), of the interpreter ("Triton's interpreter"), or of
    the functions that an emulator stands in for."""
    platform: str = ""
    """Vendor and architecture of the device, as a Platform writes them: "nvidia:sm90". Empty where
    none ran the kernels, which proves nothing about the hardware."""
    interpreted: bool = False
    """Whether an interpreter ran the library's own kernels. Without it and without a platform, an
    emulator ran in their place."""
    libraries: tuple[str, ...]
    """With their versions; for an emulator, also the one whose signatures it was compared with."""
    date: str
    """The day of the run, as 2026-11-21."""
    cases: int = 0
    """Cases of the suite that agreed, eagerly and from graphs; 0 where they were not counted."""

    def __post_init__(self) -> None:
        check_fields("verified", self, CHECKS)
        if not self.on.strip():
            raise refusal("verified, on", self.on, "the name of a device or an emulator")
        if self.platform and not re.fullmatch(PLATFORM, self.platform):
            expected = "VENDOR:ARCH, or nothing for an emulator"
            raise refusal("verified, platform", self.platform, expected)
        if self.platform and self.interpreted:
            expected = "nothing where the kernels were interpreted"
            raise refusal("verified, platform", self.platform, expected)
        from datetime import date  # noqa: PLC0415  # off the path of cards that were checked

        try:
            date.fromisoformat(self.date)
        except ValueError:
            raise refusal("verified, date", self.date, "a day, such as 2026-11-21") from None

    @property
    def emulated(self) -> bool:
        """Whether a stand-in of the library ran, and none of its kernels."""
        return not self.platform and not self.interpreted

    @property
    def vendor(self) -> str:
        """As in `Platform`; empty without a device."""
        return self.platform.partition(":")[0]

    @property
    def arch(self) -> str:
        """As in `Platform`; empty without a device."""
        return self.platform.partition(":")[2]

    def __str__(self) -> str:
        return f"an emulator of {self.on}" if self.emulated else self.on

    def to_dict(self) -> dict[str, Any]:
        return {**plain_fields(self), "emulated": self.emulated}


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
