"""Texts without what names a user or a machine: folders, the user and the host."""

from __future__ import annotations

import getpass
import re
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

PATH = re.compile(r"(?<![\w.:/])[~…]?/[^\s'\"`,;:()\[\]<>]+")
"""An absolute path, or one below a home folder. The `/` of an address or a share is none."""
HIDDEN = "…"


def anonymous(text: str) -> str:
    """The text with only the last part of each absolute path, and without the names of the user
    and of the host."""
    for folder in _folders():
        text = re.sub(rf"{re.escape(folder)}(?![\w.-])", HIDDEN, text)
    text = PATH.sub(lambda found: f"{HIDDEN}/{found[0].rpartition('/')[2]}", text)
    for name in _names():
        text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", HIDDEN, text)
    return text


def _folders() -> list[str]:
    """Folders whose names may hold spaces, which end a path in a text; the longest first."""
    found = {sys.prefix, sys.base_prefix, tempfile.gettempdir(), *sys.path}
    with suppress(RuntimeError, OSError):
        found |= {str(Path.home()), str(Path.cwd())}
    kept = {folder.rstrip("/") for folder in found if folder.startswith("/")}
    return sorted(kept - {""}, key=len, reverse=True)


def _names() -> Iterator[str]:
    with suppress(OSError, KeyError, ImportError):
        yield getpass.getuser()
    with suppress(RuntimeError):
        yield from filter(None, [Path.home().name])
    host = socket.gethostname()
    yield from filter(None, dict.fromkeys((host, host.partition(".")[0])))
