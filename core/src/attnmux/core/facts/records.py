"""Records of this machine's measurements, and the reading of their JSON files.

A reader takes every record that it can read. attnmux-testing writes the files.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, ClassVar, Generic, TypeVar

from attnmux.core.facts.errors import AttnmuxError, InvalidInput
from attnmux.core.facts.fields import Check, Name, read_fields
from attnmux.core.facts.files import Files
from attnmux.core.facts.frozen import plain
from attnmux.core.facts.platform import Platform
from attnmux.core.facts.reading import Fact

FORMAT = 1
"""The format of the files; others are not read."""

MOST_BYTES = 64_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Device(Fact):
    """The facts that decide whether two devices are equally fast."""

    noun = "device"

    vendor: str
    arch: str
    name: str
    """The product."""
    runtime: str

    def __post_init__(self) -> None:
        read_fields(self, self.noun)

    @classmethod
    def of(cls, platform: Platform) -> Device:
        return cls(**{field: getattr(platform, field) for field in cls.__dataclass_fields__})


def is_figure(number: float) -> bool:
    """Whether a number is positive, and one that a float can hold."""
    return 0 < number <= sys.float_info.max


MICROSECONDS = "microseconds, more than 0"
Microseconds = Annotated[float, Check(MICROSECONDS, is_figure)]
Versions = Annotated[Mapping[str, str], Check("texts by name of distribution")]


R = TypeVar("R", bound="Record")


@dataclass(frozen=True, kw_only=True, slots=True)
class Records(Generic[R]):
    """The content of a file."""

    found: tuple[R, ...] = ()
    problems: tuple[str, ...] = ()
    """Entries that could not be read, in words."""
    damaged: bool = False
    """Whether the file as a whole could not be read."""
    is_foreign: bool = False
    """Whether it is also none that any version of attnmux wrote."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Record(Fact):
    """A time that a backend took on one device with some versions of its libraries.

    Raises InvalidInput for an empty field or one of another type (only a device's product and
    runtime may be empty), a median that is not a positive number, and a date without a time zone.
    """

    LEAST_GAIN: ClassVar = 0.02
    """The share of the time that a backend or a launch must save to replace another. Smaller
    differences count as noise."""

    listed: ClassVar[str]
    """The name of the list in the file."""
    keyed_by: ClassVar[tuple[str, ...]]
    """Further fields that the time belongs to."""

    backend: Name
    """`plugin/name`."""
    device: Annotated[Device, Check("a Device of texts")]
    versions: Versions
    """Versions of the plugin and its libraries, by distribution."""
    median_us: Microseconds
    date: Annotated[
        datetime, Check("a date with its time zone", lambda date: date.utcoffset() is not None)
    ]

    def __post_init__(self) -> None:
        read_fields(self, self.noun)

    @property
    def key(self) -> tuple[object, ...]:
        """Identifies a record: the later of two with the same key counts."""
        names = ("backend", "device", "versions", *self.keyed_by)
        return tuple(getattr(self, name) for name in names)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        data = {field.name: plain(getattr(self, field.name)) for field in fields(self)}
        return {**data, "date": self.date.isoformat()}

    @classmethod
    def read(cls: type[R], path: Path | None) -> Records[R]:
        """Everything in the file that can be read; nothing without a file. Raises nothing."""
        try:
            return Records() if path is None else cls.opened(path)
        except OSError as error:
            why = error.strerror or error
            return Records(problems=(f"{path} cannot be read: {why}",), damaged=True)

    @classmethod
    def opened(cls: type[R], path: Path, *, writable: bool = False) -> Records[R]:
        """Like `read`, but raises OSError as `Files.read` does."""
        data: Any = None
        try:
            data = json.loads(Files.read(str(path), MOST_BYTES, writable=writable))
            if data["format"] != FORMAT:
                raise ValueError(f"its format is {data['format']!r}, this version reads {FORMAT}")
            entries = list(data[cls.listed])
        except FileNotFoundError:
            return Records()
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            problem = (
                f"{path} holds no {cls.listed} that can be read: {AttnmuxError.in_brief(error)}; "
                "delete it, or keep new ones, which sets aside a file of another version"
            )
            is_ours = isinstance(data, dict) and {"format"} <= data.keys() <= {"format", cls.listed}
            return Records(problems=(problem,), damaged=True, is_foreign=not is_ours)
        found, problems = [], []
        for place, entry in enumerate(entries):
            try:
                found.append(cls.from_dict(entry))
            except InvalidInput as error:
                problems.append(f"{path}, {cls.listed}[{place}]: {error}")
        return Records(found=latest(found), problems=tuple(problems))

    @classmethod
    def content(cls: type[R], records: Iterable[R]) -> dict[str, Any]:
        """The content of a file with the last record of each key."""
        return {"format": FORMAT, cls.listed: [record.to_dict() for record in latest(records)]}


def latest(records: Iterable[R]) -> tuple[R, ...]:
    """The last record of each key; for equal dates, the last one given."""
    by_key: dict[tuple[object, ...], R] = {}
    for record in records:
        known = by_key.get(record.key)
        if known is None or known.date <= record.date:
            by_key[record.key] = record
    return tuple(by_key.values())
