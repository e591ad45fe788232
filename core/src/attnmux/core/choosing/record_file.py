"""Files in which this machine keeps what was measured on it: lists of records, as JSON.

A reader takes whatever can be read. Writers go one after the other, and a file is replaced as a
whole: nobody sees half of one, and nobody's records are lost.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from attnmux.core.errors import InvalidInput, in_brief

LOCK_SECONDS = 60
"""For another writer to be done."""

R = TypeVar("R")


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordFile(Generic[R]):
    """A file of records of one kind."""

    path: Path
    name: str
    """Of the list in the file."""
    format: int
    """Of the records; those of another one are not read."""
    parse: Callable[[Mapping[str, Any]], R]
    """Of a record's dict. Raises InvalidInput."""
    to_dict: Callable[[R], Mapping[str, Any]]
    kept: Callable[[Iterable[R]], tuple[R, ...]]
    """Of several about the same, those that count; the later ones stand behind the earlier."""

    def read(self) -> Records[R]:
        """Whatever of the file can be read; nothing where there is none. Raises nothing."""
        try:
            return self._records("rb")
        except OSError as error:
            problem = f"{self.path} cannot be read: {in_brief(error)}"
            return Records(problems=(problem,), damaged=True)

    def prepare(self) -> Records[R]:
        """What the file holds, read as `add` reads it: what would stop that is raised before
        there is anything to lose. Makes the folder. Raises as `add`."""
        with self._locked():
            return self._records("r+b")

    def add(self, records: Iterable[R]) -> None:
        """Put records into the file; they replace earlier ones about the same.

        A file whose content cannot be read is set aside with `.damaged` behind its name; single
        entries that cannot be read are dropped. Raises OSError where the file cannot be opened, the
        folder cannot be written, or another writer does not come to an end: all is as it was then.
        """
        with self._locked():
            before = self._records("r+b")
            kept = self.kept([*before.found, *records])
            data = {"format": self.format, self.name: [self.to_dict(each) for each in kept]}
            self._replace(data, set_aside=before.damaged)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        # Off the path of who only reads
        from filelock import FileLock  # noqa: PLC0415

        self.path.parent.mkdir(parents=True, exist_ok=True)
        lock = self.path.with_name(f".{self.path.name}.lock")
        with FileLock(lock, timeout=LOCK_SECONDS):
            yield

    def _records(self, mode: str) -> Records[R]:
        """mode: of `open`; a writer's refuses a folder and what may only be read. Raises OSError
        where the file is there and cannot be opened."""
        try:
            with self.path.open(mode) as file:
                data = json.load(file)
            if data["format"] != self.format:
                raise ValueError(
                    f"its format is {data['format']!r}, this version reads {self.format}"
                )
            entries = list(data[self.name])
        except FileNotFoundError:
            return Records()
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            problem = (
                f"{self.path} holds no {self.name} that can be read: {in_brief(error)}; "
                "delete it, or keep new ones, which sets it aside"
            )
            return Records(problems=(problem,), damaged=True)
        found, problems = [], []
        for place, entry in enumerate(entries):
            try:
                found.append(self.parse(entry))
            except InvalidInput as error:
                problems.append(f"{self.path}, {self.name}[{place}]: {error}")
        return Records(found=self.kept(found), problems=tuple(problems))

    def _replace(self, data: object, *, set_aside: bool) -> None:
        """Under the lock, so that nobody else has a scratch file."""
        scratch = self.path.with_name(f".{self.path.name}.new")
        try:
            with scratch.open("w", encoding="utf-8") as file:
                json.dump(data, file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            # Who could read the old one can read the new one
            if self.path.exists():
                shutil.copymode(self.path, scratch)
            if set_aside:
                self.path.replace(self.path.with_name(f"{self.path.name}.damaged"))
            scratch.replace(self.path)
        except BaseException:
            scratch.unlink(missing_ok=True)
            raise


@dataclass(frozen=True, kw_only=True, slots=True)
class Records(Generic[R]):
    """What a file holds."""

    found: tuple[R, ...] = ()
    problems: tuple[str, ...] = ()
    """What could not be read, in words."""
    damaged: bool = False
    """Whether the file as a whole could not be read."""
