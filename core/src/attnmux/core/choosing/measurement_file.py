"""The file that keeps the measurements of a machine."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from attnmux.core.choosing.measurement import Measurement, latest
from attnmux.core.errors import InvalidInput

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
    try:
        data = json.loads(path.read_bytes())
        if data["format"] != FORMAT:
            raise ValueError(f"its format is {data['format']!r}, this version reads {FORMAT}")
        entries = list(data["measurements"])
    except FileNotFoundError:
        return Stored()
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        why = f"{type(error).__name__}: {error}"
        return Stored(
            problems=(f"{path} holds no measurements that can be read: {why}",), damaged=True
        )
    found, problems = [], []
    for place, entry in enumerate(entries):
        try:
            found.append(Measurement.from_dict(entry))
        except InvalidInput as error:
            problems.append(f"{path}, measurement {place}: {error}")
    return Stored(measurements=latest(found), problems=tuple(problems))


def add_measurements(path: Path, measurements: Iterable[Measurement]) -> None:
    """Put measurements into the file; they replace older ones of the same subject.

    The file is replaced as a whole, so that a reader sees the old or the new one. A file that
    cannot be read is set aside with `.damaged` behind its name; single entries that cannot be read
    are dropped. Raises OSError where the folder cannot be written.
    """
    before = read_measurements(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = latest([*before.measurements, *measurements])
    data = {"format": FORMAT, "measurements": [each.to_dict() for each in kept]}
    handle, scratch = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(handle, "w", encoding="utf-8") as file:
            json.dump(data, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        if before.damaged:
            path.replace(path.with_name(f"{path.name}.damaged"))
        os.replace(scratch, path)
    except BaseException:
        Path(scratch).unlink(missing_ok=True)
        raise
