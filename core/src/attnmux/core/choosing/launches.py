"""What a backend found out about its own launches on this machine: tiles, warps, splits.

The words of subject and values are the backend's; who has tuned for the same subject on the same
device, with the same versions, is served by what was fastest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from attnmux.core.choosing.common.frozen import FrozenMapping
from attnmux.core.choosing.machine.platform import Platform
from attnmux.core.choosing.measured.measurement import EXPECTED, TEXT
from attnmux.core.choosing.measured.records import Device, RecordFile
from attnmux.core.choosing.offer.libraries import Libraries, installed_version
from attnmux.core.errors import InvalidInput

FORMAT = 1
"""Of the file; another one is not read."""

Value = bool | int | float | str


def _is_versions(value: object) -> bool:
    _, holds = EXPECTED["versions"]
    # No distribution is asked for that has no name
    return holds(value) and isinstance(value, Mapping) and all(value)


def _is_values(value: object) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(name, str) and isinstance(one, (bool, int, float, str))
        for name, one in value.items()
    )


CHECKED: Mapping[str, tuple[str, Callable[[object], bool]]] = {
    "backend": TEXT,
    "device": EXPECTED["device"],
    "versions": ("texts by name of distribution", _is_versions),
    "subject": ("numbers and words by name", _is_values),
    "values": ("numbers and words by name", _is_values),
    "median_us": EXPECTED["median_us"],
    "date": EXPECTED["date"],
}
"""What each field has to hold."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TunedLaunch:
    """The fastest launch that was tried for a subject.

    Raises InvalidInput for a field of another type or without content.
    """

    backend: str
    """`plugin/name`."""
    device: Device
    versions: Mapping[str, str]
    """Of the plugin and its libraries, by distribution."""
    subject: Mapping[str, Value]
    """What is launched, and for which shapes."""
    values: Mapping[str, Value]
    """How."""
    median_us: float
    date: datetime

    def __post_init__(self) -> None:
        for name, (expected, holds) in CHECKED.items():
            value = getattr(self, name)
            if not holds(value):
                raise InvalidInput(f"launch, {name}", came=repr(value), expected=expected)
        for name in ("versions", "subject", "values"):
            object.__setattr__(self, name, FrozenMapping(getattr(self, name)))

    @property
    def about(self) -> tuple[object, ...]:
        """Of two about the same, the later counts."""
        return self.backend, self.device, self.versions, self.subject

    def to_dict(self) -> dict[str, Any]:
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        plain = {name: dict(fields[name]) for name in ("versions", "subject", "values")}
        return {**fields, **plain, "device": asdict(self.device), "date": self.date.isoformat()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TunedLaunch:
        """The inverse of `to_dict`; raises InvalidInput for anything else."""
        try:
            device, date = Device(**data["device"]), datetime.fromisoformat(data["date"])
            return cls(**{**data, "device": device, "date": date})
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, InvalidInput):
                raise
            came = f"{type(error).__name__}: {error}"
            expected = f"the fields {', '.join(cls.__dataclass_fields__)}"
            raise InvalidInput("launch", came=came, expected=expected) from error


def launch_file(path: Path) -> RecordFile[TunedLaunch]:
    return RecordFile(
        path=path,
        name="launches",
        format=FORMAT,
        parse=TunedLaunch.from_dict,
        to_dict=TunedLaunch.to_dict,
        kept=_latest,
    )


def current_launches(
    launches: Iterable[TunedLaunch],
    backend: str,
    platform: Platform,
    *,
    libraries: Libraries = installed_version,
) -> tuple[TunedLaunch, ...]:
    """The launches of `backend` that were tuned on this device with the versions installed now."""
    device = Device.of(platform)
    return tuple(
        each
        for each in launches
        if (each.backend, each.device) == (backend, device)
        and all(libraries(name) == version for name, version in each.versions.items())
    )


def _latest(launches: Iterable[TunedLaunch]) -> tuple[TunedLaunch, ...]:
    found: dict[tuple[object, ...], TunedLaunch] = {}
    for each in launches:
        known = found.get(each.about)
        if known is None or known.date <= each.date:
            found[each.about] = each
    return tuple(found.values())
