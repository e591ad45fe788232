"""A file in the user's cache folder that keeps answers between starts."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from attnmux.core.facts.files import Files

MOST_BYTES = 64_000_000


class Store(NamedTuple):
    """A file of JSON that can be lost: an unreadable one counts as empty."""

    path: Path | None

    @classmethod
    def of(cls, folder: Path | None, name: str) -> Store:
        """The file of this environment in `folder`."""
        here = sha256(sys.prefix.encode(errors="replace")).hexdigest()
        return cls(None if folder is None else folder / f"{name}-{here[:16]}.json")

    def read(self) -> dict[str, Any]:
        """The content; empty if there is none, or if another user could have written it."""
        try:
            if self.path is None:
                return {}
            content = json.loads(Files.read(str(self.path), MOST_BYTES, own=True))
        except (OSError, ValueError, RecursionError):
            return {}
        return content if isinstance(content, dict) else {}

    def write(self, content: object) -> None:
        """Replace the file as a whole. Only this user can read it."""
        if self.path is None:
            return
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with Files.replacing(self.path, mode=0o600) as file:
                json.dump(content, file)
