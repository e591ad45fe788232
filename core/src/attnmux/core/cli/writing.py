"""Files of this machine that a verb writes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from attnmux.core.errors import SettingsError, in_brief


@contextmanager
def writing(path: Path, *, otherwise: str) -> Iterator[None]:
    """Raises SettingsError, with what else can be done, where the file cannot be written."""
    try:
        yield
    except OSError as error:
        raise SettingsError(f"{path} cannot be written: {in_brief(error)}; {otherwise}") from error
