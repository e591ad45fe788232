"""Writing the files that keep what this machine has measured.

Writers exclude each other and replace the whole file: no reader sees half of a file, and no writer
loses another one's records.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from filelock import FileLock

from attnmux.core.plugin import Files
from attnmux.core.verbs import Record, Records

LOCK_SECONDS = 60
"""How long to wait for another writer."""

R = TypeVar("R", bound=Record)


@dataclass(frozen=True, slots=True)
class RecordFile(Generic[R]):
    """A file of records of one kind: of `Measurement` or of `TunedLaunch`."""

    path: Path
    kind: type[R]

    def read(self) -> Records[R]:
        """The content of the file, as `Record.read` returns it."""
        return self.kind.read(self.path)

    def prepare(self) -> Records[R]:
        """The content, read as `add` reads it, so that obstacles show before anything is measured.
        Creates the folder. Raises what `add` raises."""
        with self._locked():
            return self._content()

    def add(self, records: Iterable[R]) -> None:
        """Put records into the file; they replace earlier ones with the same key.

        A file of another version is kept with `.damaged` after its name; single entries that
        cannot be read are dropped. Raises OSError if the file cannot be opened or holds something
        else, the folder is not writable, or another writer does not finish; the file is unchanged
        then.
        """
        with self._locked():
            before = self._content()
            data = self.kind.content([*before.found, *records])
            self._replace(data, set_aside=before.damaged)

    def _content(self) -> Records[R]:
        found = self.kind.opened(self.path, writable=True)
        if found.is_foreign:
            raise OSError(errno.EEXIST, f"it holds something else than {self.kind.listed}")
        return found

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lock = self.path.with_name(f".{self.path.name}.lock")
        with FileLock(lock, timeout=LOCK_SECONDS):
            yield

    def _replace(self, data: object, *, set_aside: bool) -> None:
        with Files.replacing(self.path) as file:
            json.dump(data, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
            if self.path.exists():  # keeps its permissions
                shutil.copymode(self.path, file.name)
            if set_aside:
                self.path.replace(self.path.with_name(f"{self.path.name}.damaged"))
