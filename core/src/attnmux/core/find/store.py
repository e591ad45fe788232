"""Files in the user's cache folder that keep answers of plugins between starts."""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from attnmux.core.facts.files import read_file, replacing

MOST_BYTES = 64_000_000


def search_path() -> list[str]:
    """`sys.path` without the folder of the script: no plugin is installed there, and a file of the
    script's must not take the place of a plugin's module."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    own = ("", None if script is None else os.path.dirname(os.path.abspath(script)))
    path = [str(folder) for folder in sys.path]
    return path[1:] if path and path[0] in own else path


class Store(NamedTuple):
    """A file of JSON that can be lost: an unreadable one counts as empty."""

    path: Path | None

    @classmethod
    def of(cls, folder: Path | None, name: str) -> Store:
        """The file of this environment in `folder`."""
        here = sha256("\n".join([sys.prefix, *search_path()]).encode()).hexdigest()
        return cls(None if folder is None else folder / f"{name}-{here[:16]}.json")

    def read(self) -> dict[str, Any]:
        """The content; empty where there is none, or where another user could have written it, as
        a card names code that will run."""
        try:
            if self.path is None or not is_own(self.path):
                return {}
            content = json.loads(read_file(str(self.path), MOST_BYTES))
        except (OSError, ValueError, RecursionError):
            return {}
        return content if isinstance(content, dict) else {}

    def write(self, content: object) -> None:
        """Replace the file as a whole. Only this user can read it."""
        if self.path is None:
            return
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(self.path, mode=0o600) as file:
                json.dump(content, file)


def is_own(path: Path) -> bool:
    """Whether only this user and root can write the file. Raises OSError where there is none."""
    status = os.stat(path)
    if not hasattr(os, "geteuid"):  # access lists decide there
        return True
    return status.st_uid in (0, os.geteuid()) and not status.st_mode & 0o022
