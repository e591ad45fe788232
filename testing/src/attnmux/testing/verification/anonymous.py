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

HIDDEN = "…"
SEPARATOR = re.compile(r"[/\\]")

SECRETS = re.compile(
    r"""(?ix)
    (?P<kept>
        \b(?:[\w-]*(?:token|secret|passw(?:or)?d|credential|api[_-]?key|access[_-]?key)[\w-]*
           |authorization|cookie) ["']? \s* [:=] \s* (?:(?:bearer|basic|token)\s+)? ["']?
      | \b(?:bearer|basic)\s+
    ) [^\s"',;]+
    | \b(?:hf|ghp|gho|ghs|github_pat|glpat|sk|pk|xox[a-z]|AKIA)[_-]?[A-Za-z0-9_-]{16,}"""
)
"""Values after a word such as `token=`, and texts that are keys by their beginning."""

ADDRESSES = re.compile(
    r"""(?ix)
    \b[a-z][a-z0-9+.-]*://[^\s"'<>)\]]*
    | \b[\w.+-]+@[\w-]+(?:\.[\w-]+)*
    | (?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?(?![\w.]*\w)
    | (?<![\w:])(?:[0-9a-f]{1,4}:+){2,7}[0-9a-f]{1,4}(?![\w:])
    | \b(?:[a-z0-9-]+\.)+(?:com|net|org|io|ai|dev|cloud|corp|internal|lan|local|example)\b(?::\d+)?
    | \b[a-z][a-z0-9-]*(?:\.[a-z0-9-]+)*(?<!\.py|\.cc|\.cu)(?<!\.h)(?<!\.cpp|\.cuh):\d{4,5}\b"""
)
"""URLs, e-mails, IP addresses, names of hosts, and anything with a port."""

WORD = r"[^\s'\"`,;:()\[\]<>]"
SPACE = rf"\ (?=(?:{WORD}|\ )*{WORD}/)"
"""A space inside a path: a later word has a `/`, and no punctuation is between."""
PATHS = re.compile(
    rf"""(?x)
    (?<=(?P<quote>["'`])) (?:[A-Za-z]:\\|[~.\w …-]*/) [^"'`\n]* (?=(?P=quote))  # holds anything
    | (?<![\w.:/]) [~…]? / (?:{WORD}|{SPACE})+
    | (?<!\w) [A-Za-z]:\\ {WORD}+
    | (?<![\w./…]) (?: \.{{1,2}}/ (?:{WORD}|{SPACE})+
        | (?:[\w.@+-]+/){{2,}} [\w.@+-]*
        | [\w.@+-]+ / [\w@+-]* \.[A-Za-z]\w* )"""
)
"""Paths in quotes, absolute ones, also below a home folder, and those of Windows. A relative path
begins with a dot, has several folders or ends in a file's name: `cpu/native` is a backend."""


def anonymous(text: str) -> str:
    """The text with only the last part of each path, and without the names of the user and of the
    host."""
    for folder in _folders():
        text = re.sub(rf"{re.escape(folder)}(?![\w.-])", HIDDEN, text)
    text = PATHS.sub(lambda found: f"{HIDDEN}/{SEPARATOR.split(found[0])[-1]}", text)
    for name in _names():
        text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", HIDDEN, text)
    return text


def anonymous_error(text: str) -> str:
    """The text as `anonymous` gives it, also without credentials and addresses."""
    text = SECRETS.sub(lambda found: (found["kept"] or "") + HIDDEN, text)
    return anonymous(ADDRESSES.sub(HIDDEN, text))


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
