"""One measurement of a backend on a device, and what tells it from others."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from attnmux.core.choosing.common.frozen import FrozenMapping
from attnmux.core.choosing.judge.axes import Demand, Question
from attnmux.core.choosing.machine.platform import Platform
from attnmux.core.choosing.offer.card import Offer
from attnmux.core.choosing.offer.libraries import Libraries, installed_version, parsed_requirement
from attnmux.core.errors import InvalidInput

STATED_APART = frozenset({"vendor", "arch", "version", "features", "runtime", "phase"})
"""Axes that a measurement states by its device and its phase."""

DECIDED = ("page_size", "kv_dtype")
"""Values that the solver decides where nobody asks for one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """What makes a device the same one, for its speed."""

    vendor: str
    arch: str
    name: str
    """The product."""
    runtime: str

    @classmethod
    def of(cls, platform: Platform) -> Device:
        return cls(**{field: getattr(platform, field) for field in cls.__dataclass_fields__})


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _is_device(value: object) -> bool:
    return isinstance(value, Device) and all(isinstance(w, str) for w in asdict(value).values())


def _is_versions(value: object) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(word, str) for pair in value.items() for word in pair
    )


def _is_time(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value) and value > 0
    except OverflowError:
        return False


def _is_count(value: object) -> bool:
    return value is None or (isinstance(value, int) and not isinstance(value, bool) and value > 0)


def _is_date(value: object) -> bool:
    return isinstance(value, datetime) and value.utcoffset() is not None


TEXT = ("a text that is not empty", _is_text)

EXPECTED: Mapping[str, tuple[str, Callable[[object], bool]]] = {
    "backend": TEXT,
    "phase": TEXT,
    "shape": TEXT,
    "workload": TEXT,
    "device": ("a Device of texts", _is_device),
    "versions": ("texts by name of distribution", _is_versions),
    "median_us": ("microseconds, more than 0", _is_time),
    "batch_size": ("a number of requests, or none", _is_count),
    "conformant": ("true or false", lambda value: isinstance(value, bool)),
    "date": ("a date with its time zone", _is_date),
}
"""What each field of a measurement has to hold."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """How long a backend took for one workload of one phase on one device.

    Raises InvalidInput for a field of another type or without content (a device's product and
    runtime may be unknown), a median that is no positive number, and a date without a time zone.
    """

    backend: str
    """`plugin/name`."""
    phase: str
    shape: str
    """`shape_of` the question. Where that leaves the page size open, the backend preferred it."""
    workload: str
    """The batch that was timed, in the words of whoever timed it: "batch=32,kv=4096". Only equal
    workloads are compared."""
    device: Device
    versions: Mapping[str, str]
    """`versions_of` the backend."""
    median_us: float
    """Of one step, in microseconds."""
    conformant: bool
    """Whether the backend passed its conformance check in this phase, with these versions."""
    date: datetime
    batch_size: int | None = None
    """Requests of the step, where a choice may depend on them: of the decode steps that device
    graphs are captured for."""

    def __post_init__(self) -> None:
        for name, (expected, holds) in EXPECTED.items():
            value = getattr(self, name)
            if not holds(value):
                raise InvalidInput(f"measurement, {name}", came=repr(value), expected=expected)
        object.__setattr__(self, "versions", FrozenMapping(self.versions))

    @property
    def subject(self) -> tuple[object, ...]:
        """What was measured: of two with the same subject, the later counts."""
        where = (self.device, self.versions)
        return self.backend, self.phase, self.shape, self.workload, *where

    def to_dict(self) -> dict[str, Any]:
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        device, versions = asdict(self.device), dict(self.versions)
        return {
            **fields,
            "device": device,
            "versions": versions,
            "date": self.date.isoformat(),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Measurement:
        """The inverse of `to_dict`; raises InvalidInput for anything else."""
        try:
            device, date = Device(**data["device"]), datetime.fromisoformat(data["date"])
            return cls(**{**data, "device": device, "date": date})
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, InvalidInput):
                raise
            came = f"{type(error).__name__}: {error}"
            raise InvalidInput("measurement", came=came, expected="its fields") from error


def shape_of(question: Question) -> str:
    """What is asked of a backend, beside phase and platform: "dtype=bfloat16,head_dim=128,…".

    A page size or a KV dtype that nobody asked for is left out: the solver tries several.
    """
    return ",".join(
        sorted(
            f"{axis.name}={value}"
            for axis, value in insisted(question)
            if axis.name not in STATED_APART
        )
    )


def insisted(question: Question) -> list[Demand]:
    """The demands without those that the solver only tries."""
    origins = question.request.origins
    tried = {name for name in DECIDED if origins.get(name, "default") == "default"}
    return [(axis, value) for axis, value in question.demands if axis.name not in tried]


def versions_of(offer: Offer, libraries: Libraries = installed_version) -> Mapping[str, str]:
    """The versions of the plugin and of those libraries of the card that are installed."""
    named = {
        parsed_requirement(text).name
        for alternatives in offer.card.requirements()
        for text in alternatives
    }
    found = {name: version for name in sorted(named) if (version := libraries(name)) is not None}
    return FrozenMapping({**found, offer.distribution or offer.plugin: offer.version})


def latest(measurements: Iterable[Measurement]) -> tuple[Measurement, ...]:
    """The last of each subject; among those of one date the last that is given."""
    found: dict[tuple[object, ...], Measurement] = {}
    for each in measurements:
        known = found.get(each.subject)
        if known is None or known.date <= each.date:
            found[each.subject] = each
    return tuple(found.values())
