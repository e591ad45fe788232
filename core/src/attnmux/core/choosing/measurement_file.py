"""The file that keeps the measurements of a machine."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from attnmux.core.choosing.measured.measurement import Measurement
from attnmux.core.choosing.measured.records import RecordFile, latest

FORMAT = 1
"""Of the file; another one is not read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """What a file holds."""

    measurements: tuple[Measurement, ...] = ()
    problems: tuple[str, ...] = ()
    """What could not be read, in words."""
    damaged: bool = False
    """Whether the file as a whole could not be read."""


def read_measurements(path: Path) -> Stored:
    """Whatever of the file can be read; nothing where there is none. Raises nothing."""
    records = measurement_file(path).read()
    return Stored(measurements=records.found, problems=records.problems, damaged=records.damaged)


def add_measurements(path: Path, measurements: Iterable[Measurement]) -> None:
    """Put measurements into the file; they replace older ones of the same subject.

    As `RecordFile.add`.
    """
    measurement_file(path).add(measurements)


def measurement_file(path: Path) -> RecordFile[Measurement]:
    return RecordFile(
        path=path,
        name="measurements",
        format=FORMAT,
        parse=Measurement.from_dict,
        to_dict=Measurement.to_dict,
        kept=latest,
    )
