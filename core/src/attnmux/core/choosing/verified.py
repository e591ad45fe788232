"""What a backend was really run on, as data: a card's `verified_on`."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any

from attnmux.core.choosing.machine.platform import Platform
from attnmux.core.errors import InvalidInput

PLATFORM = re.compile(r"[^:,\s]+:[^:,\s]+")


@dataclass(frozen=True, kw_only=True, slots=True)
class Verified:
    """A run of the conformance suite that the backend passed, and on what.

    Raises InvalidInput for a field of another type, an empty `on`, a platform that is not
    VENDOR:ARCH, and a date that is none.
    """

    on: str
    """The device by its name ("NVIDIA H200"); of an emulator, whose functions it has."""
    platform: str = ""
    """Vendor and architecture of the device, as a Platform writes them: "nvidia:sm90". Empty: an
    emulator of the vendor's functions, which says nothing of the hardware."""
    libraries: tuple[str, ...]
    """With their versions; of an emulator, the one whose signatures it was compared with too."""
    date: str
    """The day of the run, as 2026-11-21."""

    def __post_init__(self) -> None:
        for field in ("on", "platform", "date"):
            if not isinstance(getattr(self, field), str):
                raise _refusal(field, getattr(self, field), "text")
        _check_libraries(self.libraries)
        if not self.on.strip():
            raise _refusal("on", self.on, "the name of a device or an emulator")
        if self.platform and not PLATFORM.fullmatch(self.platform):
            expected = "VENDOR:ARCH, or nothing for an emulator"
            raise _refusal("platform", self.platform, expected)
        try:
            date.fromisoformat(self.date)
        except ValueError:
            raise _refusal("date", self.date, "a day, such as 2026-11-21") from None

    @property
    def emulated(self) -> bool:
        """Whether no device was there."""
        return not self.platform

    @property
    def vendor(self) -> str:
        """As in `Platform`; empty of an emulator."""
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
    """The devices, each once, or that it was an emulator alone; empty where nothing is said."""
    if emulated_alone(runs):
        return "an emulator alone"
    return ", ".join(dict.fromkeys(run.on for run in runs if not run.emulated))


def doubt(runs: Sequence[Verified], platform: Platform) -> str:
    """What a user of a platform should know: that nothing of its kind was run on. Else empty."""
    kind = f"{platform.vendor}:{platform.arch}"
    if any(run.platform == kind for run in runs):
        return ""
    if not runs:
        return "its card names no machine that it was run on"
    tried = "; ".join(
        dict.fromkeys(f"{run} ({', '.join((*run.libraries, run.date))})" for run in runs)
    )
    return f"never run on {kind}, only on {tried}"


def _check_libraries(libraries: object) -> None:
    if not isinstance(libraries, tuple) or not all(isinstance(each, str) for each in libraries):
        raise _refusal("libraries", libraries, 'a tuple of text, such as ("torch 2.11",)')


def _refusal(field: str, came: object, expected: str) -> InvalidInput:
    return InvalidInput(f"verified, {field}", came=reprlib.repr(came), expected=expected)
