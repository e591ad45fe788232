"""The configuration file: which one counts, whether to trust it, and its table of settings."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from attnmux.core.facts.errors import AttnmuxError, SettingsError
from attnmux.core.facts.files import Files, check_own, read_all

CONFIG = "ATTNMUX_CONFIG"
"""The variable that names the file."""
MOST_BYTES = 1_000_000
OWN_KEY = re.compile(r"""attnmux["']?\s*[].=]""")
"""In every spelling that TOML has for our table."""


def find_settings(directory: Path | None, named: str) -> tuple[Path, Mapping[str, Any]]:
    """The named file, else the nearest one with our settings, and the settings; an empty table
    without one."""
    if named:
        path = Path(named).absolute()
        table = _table(path, _text(path))
        if table is None:
            problem = "holds no settings" if path.exists() else "does not exist"
            raise SettingsError(f"{CONFIG}: {path} {problem}")
        return path, table
    try:
        directory = Path.cwd() if directory is None else directory
    except OSError as error:
        raise SettingsError(
            "the working directory was deleted or cannot be read: change to another"
        ) from error
    for folder in (directory, *directory.parents):
        for name in ("attnmux.toml", "pyproject.toml"):
            path = folder / name
            table = _found(path)
            if table is not None:
                return path, table
    return directory, {}


def _found(path: Path) -> Mapping[str, Any] | None:
    """The settings in a file that nobody named; None if there are none. Raises SettingsError for
    those that another user, or a group, could have written."""
    if not hasattr(os, "geteuid"):  # access lists decide there
        return _table(path, _text(path))
    try:
        with _folder(path.parent) as folder, Files.opened(path.name, folder=folder) as file:
            text = read_all(file, MOST_BYTES).decode("utf-8")
            link = os.stat(path.name, dir_fd=folder, follow_symlinks=False)
            places = ((path, link), (path, os.fstat(file)), (path.parent, os.fstat(folder)))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} cannot be read: {error}") from error
    table = _table(path, text)
    for place, status in () if table is None else places:
        try:
            check_own(status)
        except OSError as error:
            raise SettingsError(
                f"{path} is not read, as {place} {error}; if you trust it, set {CONFIG}={path}"
            ) from None
    return table


@contextmanager
def _folder(path: Path) -> Iterator[int]:
    """The descriptor of a folder, which need not be readable. Raises OSError."""
    descriptor = os.open(path, getattr(os, "O_PATH", os.O_RDONLY))
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _text(path: Path) -> str | None:
    """The content of a file, None if there is none."""
    try:
        return Files.read(str(path), MOST_BYTES).decode("utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} cannot be read: {error}") from error


def _table(path: Path, text: str | None) -> Mapping[str, Any] | None:
    """The settings in a file's text; None if there is no file, or one without our table."""
    if text is None:
        return None
    is_own_file = path.name != "pyproject.toml"
    # Parsing costs milliseconds: a pyproject.toml without a key of our name is not parsed
    if not is_own_file and not OWN_KEY.search(text):
        return None
    if sys.version_info >= (3, 11):
        import tomllib  # noqa: PLC0415  # off the path without a configuration file
    else:
        import tomli as tomllib  # noqa: PLC0415  # the same, older than the standard library's
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise SettingsError(f"{path} is not TOML: {AttnmuxError.in_brief(error)}") from error
    if is_own_file and "tool" in table:
        raise SettingsError(
            f"{path}: write the settings without [tool.attnmux], a table of pyproject.toml"
        )
    for key in () if is_own_file else ("tool", "attnmux"):
        if key not in table:
            return None
        table = table[key]
        if not isinstance(table, dict):
            raise SettingsError(f"{path}: {key} is no table")
    return table
