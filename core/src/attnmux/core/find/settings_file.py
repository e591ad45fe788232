"""The configuration file: which one counts, whether to trust it, and its table of settings."""

from __future__ import annotations

import os
import re
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attnmux.core.facts.errors import SettingsError, in_brief
from attnmux.core.facts.files import read_file

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
        table = _table(path)
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
            table = _table(path)
            if table is not None:
                _check_owner(path)
                return path, table
    return directory, {}


def _table(path: Path) -> Mapping[str, Any] | None:
    """The settings in a file; None where there is no file, or one without our table."""
    own = path.name != "pyproject.toml"
    try:
        text = read_file(str(path), MOST_BYTES).decode("utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} cannot be read: {error}") from error
    # Parsing costs milliseconds: a pyproject.toml without a key of our name is not parsed
    if not own and not OWN_KEY.search(text):
        return None
    if sys.version_info >= (3, 11):
        import tomllib  # noqa: PLC0415  # off the path without a configuration file
    else:
        import tomli as tomllib  # noqa: PLC0415  # the same, older than the standard library's
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise SettingsError(f"{path} is not TOML: {in_brief(error)}") from error
    if own and "tool" in table:
        raise SettingsError(
            f"{path}: write the settings without [tool.attnmux], a table of pyproject.toml"
        )
    for key in () if own else ("tool", "attnmux"):
        if key not in table:
            return None
        table = table[key]
        if not isinstance(table, dict):
            raise SettingsError(f"{path}: {key} is no table")
    return table


def _check_owner(path: Path) -> None:
    """Raises SettingsError for a file, or a file in a folder, that another user could write."""
    if not hasattr(os, "geteuid"):  # access lists decide there
        return
    for place in (path, path.parent):
        status = os.stat(place)
        sticky = place != path and status.st_mode & stat.S_ISVTX
        if status.st_uid not in (0, os.geteuid()):
            problem = "belongs to another user"
        elif status.st_mode & stat.S_IWOTH and not sticky:
            problem = "can be written by every user"
        else:
            continue
        raise SettingsError(
            f"{path} is not read, as {place} {problem}; if you trust it, set {CONFIG}={path}"
        )
