"""GGUF files: which one a path names, and its config.json as transformers makes it."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, cast

from attnmux.core import InvalidInput

READER = "attnmux.configs", "gguf"
"""The group and the name of the entry point that reads them."""
REMEDY = "pip install 'attnmux-transformers[gguf]'"


def gguf_file(path: Path) -> Path | None:
    """The GGUF file at a path, or the only one in a folder without a config.json; else None.

    Raises InvalidInput if the folder has several.
    """
    if path.suffix.lower() == ".gguf" and os.path.isfile(path):
        return path
    if not os.path.isdir(path) or (path / "config.json").exists():
        return None
    files = sorted(path.glob("*.gguf"))
    if len(files) > 1:
        got = f"{path}, with {len(files)} GGUF files ({', '.join(each.name for each in files[:3])})"
        raise InvalidInput("model", got=got, expected="the path of one of them")
    return files[0] if files else None


def read_gguf(file: Path) -> dict[str, Any]:
    """The values of a config.json. Raises InvalidInput for a file that cannot be read, and without
    the libraries that read it."""
    group, name = READER
    for point in entry_points(group=group, name=name):
        return cast("Callable[[Path], dict[str, Any]]", point.load())(file)
    expected = f"a folder with a Hugging Face config.json; for GGUF files {REMEDY}"
    raise InvalidInput("model", got=f"{file}, a GGUF file", expected=expected)
