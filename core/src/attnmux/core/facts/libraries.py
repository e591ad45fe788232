"""Installed distributions, found without importing them, and the version ranges they may meet.

`importlib_metadata` and `packaging` take longer to import than choosing takes to answer, and the
former waits for ever where a metadata file is a pipe. So folders of metadata are listed here, and
`packaging` reads only the ranges that are not plain numbers.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, lru_cache
from hashlib import sha256
from typing import TYPE_CHECKING, NamedTuple

from attnmux.core.facts.files import read_file

if TYPE_CHECKING:
    from packaging.markers import Marker
    from packaging.specifiers import SpecifierSet

Libraries = Callable[[str], "str | None"]
"""A distribution's name → its installed version, None where it is not installed."""

SUFFIXES = (".dist-info", ".egg-info")
MOST_BYTES = 16_000_000
"""Of a metadata file. RECORD of the largest packages has a tenth of it."""


@lru_cache(maxsize=4096)
def canonical(name: str) -> str:
    """A distribution's name as PEP 503 normalises it."""
    return re.sub(r"[-_.]+", "-", name).lower()


class Distribution(NamedTuple):
    """An installed distribution: a folder of metadata on `sys.path`."""

    folder: str

    def record_hash(self) -> str:
        """The SHA-256 of RECORD, which lists the hash of every installed file; empty without it."""
        try:
            content = self.read("RECORD")
        except OSError:
            return ""
        return sha256(content).hexdigest() if content else ""

    def read(self, name: str) -> bytes:
        """A metadata file, empty where there is none. Raises OSError for anything that is no file,
        for a file that cannot be read, and for one of more than MOST_BYTES."""
        try:
            return read_file(os.path.join(self.folder, name), MOST_BYTES)
        except (FileNotFoundError, NotADirectoryError):
            return b""

    def identity(self) -> tuple[str, str]:
        """(name, version), from the first lines of the metadata; empty where unknown."""
        headers: dict[str, str] = {}
        try:
            text = (self.read("METADATA") or self.read("PKG-INFO"))[:4096]
        except OSError:
            return "", ""
        for line in text.decode(errors="replace").splitlines():
            name, colon, value = line.partition(":")
            if not colon or {"Name", "Version"} <= headers.keys():
                break
            headers.setdefault(name, printable(value.strip()))
        return headers.get("Name", ""), headers.get("Version", "")


def printable(text: str) -> str:
    """`text` with every control character escaped, so that a terminal obeys none."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class EntryPoint(NamedTuple):
    """NAME = MODULE[:ATTRIBUTE], as a distribution declares it."""

    name: str
    value: str
    distribution: Distribution

    def load(self) -> object:
        """Import the module and get the attribute. Raises whatever that raises."""
        from importlib import import_module  # noqa: PLC0415  # off the path of plugins known

        module, _, attributes = self.value.partition(":")
        found: object = import_module(module.strip())
        for name in filter(None, attributes.strip().split(".")):
            found = getattr(found, name)
        return found


Unreadable = Sequence[tuple[str, Exception]]
"""Distributions by name, and why their entry points cannot be read."""


@lru_cache(maxsize=256)
def _metadata_folders(folder: str, modified: int) -> Mapping[str, Distribution]:
    """By canonical name. `modified` is part of the key: it changes with the content."""
    found: dict[str, Distribution] = {}
    for name in os.listdir(folder):
        if name.endswith(SUFFIXES):
            key = canonical(name.rpartition(".")[0].partition("-")[0])
            found.setdefault(key, Distribution(os.path.join(folder, name)))
    return found


def distributions() -> Mapping[str, Distribution]:
    """Those on `sys.path` by canonical name. The first of a name hides the others."""
    folders = []
    for folder in map(os.fspath, sys.path):
        with suppress(OSError):
            names = _metadata_folders(folder or ".", os.stat(folder or ".").st_mtime_ns)
            folders.append(names)
    found: dict[str, Distribution] = {}
    for names in reversed(folders):
        found.update(names)
    return found


def installed_version(distribution: str) -> str | None:
    """The version in this environment, None where it is not installed."""
    found = distributions().get(canonical(distribution))
    return None if found is None else found.identity()[1] or "unknown"


def entry_points(group: str) -> tuple[Sequence[EntryPoint], Unreadable]:
    """The entry points of a group, and the distributions whose entry points cannot be read."""
    found: list[EntryPoint] = []
    unreadable: list[tuple[str, Exception]] = []
    for name, distribution in distributions().items():
        content = b""
        try:
            content = distribution.read("entry_points.txt")
            if group.encode() in content:
                found += _entry_points(distribution, content.decode(), group)
        except (OSError, ValueError) as error:
            unreadable.append((distribution.identity()[0] or name, error))
    return found, unreadable


def _entry_points(distribution: Distribution, text: str, group: str) -> Iterator[EntryPoint]:
    section = ""
    for line in map(str.strip, text.splitlines()):
        if line.startswith("["):
            section = line.strip("[] ")
        elif section == group and line and line[0] not in "#;":
            name, _, value = (part.strip() for part in line.partition("="))
            value = value.partition("[")[0].strip()
            if not re.fullmatch(r"[\w.]+(\s*:\s*[\w.]+)?", value) or not name:
                raise ValueError(f"{line!r} is not NAME = MODULE or NAME = MODULE:ATTRIBUTE")
            yield EntryPoint(printable(name), value, distribution)


def assumed(without: Collection[str], libraries: Libraries, everything: bool) -> Libraries:
    """`libraries` less those in `without`; with `everything`, any other counts as new enough.

    "New enough" is the version "", which meets every range.
    """
    absent = set(map(canonical, without))

    def version(distribution: str) -> str | None:
        if canonical(distribution) in absent:
            return None
        return "" if everything else libraries(distribution)

    return version


class Requirement(NamedTuple):
    """A PEP 508 requirement, without extras."""

    name: str
    specifier: str
    marker: Marker | None = None


NUMBERS = r"\d{1,9}(?:\.\d{1,9})*"
BOUND = re.compile(rf"\s*(>=|<=|==|!=|>|<)\s*({NUMBERS})\s*", re.ASCII)
RELEASE = re.compile(rf"({NUMBERS})(?:\+[A-Za-z0-9]+(?:[-_.][A-Za-z0-9]+)*)?", re.ASCII)
PLAIN = re.compile(r"\s*([A-Za-z0-9](?:[\w.-]*[A-Za-z0-9])?)\s*([<>=!~][^;@\[\]]*)?", re.ASCII)


@cache
def specifiers(text: str) -> SpecifierSet:
    """A version range as in PEP 440. Raises packaging's InvalidSpecifier, a ValueError."""
    from packaging.specifiers import SpecifierSet  # noqa: PLC0415  # off the path of plain ranges

    return SpecifierSet(text)


def check_range(text: str) -> None:
    """Raises ValueError for text that is no version range."""
    if _bounds(text) is None:
        specifiers(text)


@cache
def _bounds(specifier: str) -> tuple[tuple[str, tuple[int, ...]], ...] | None:
    """(operator, release) of each part of a range, None where one is not that plain."""
    found = [BOUND.fullmatch(part) for part in specifier.split(",")]
    if not all(found):
        return None
    return tuple((each[1], _numbers(each[2])) for each in found if each is not None)


# Parsing would dominate a check: every text is read once.
@cache
def within(version: str, specifier: str) -> bool:
    """Whether a range contains a version, pre-releases included. An unreadable version is only in
    the empty range."""
    release, bounds = RELEASE.fullmatch(version), _bounds(specifier)
    if release is not None and bounds is not None:
        # No bound names a local version, so PEP 440 compares the numbers alone
        return all(_meets(_numbers(release[1]), *bound) for bound in bounds)
    from packaging.version import InvalidVersion  # noqa: PLC0415  # as above

    try:
        return specifiers(specifier).contains(version, prereleases=True)
    except InvalidVersion:
        return not specifier


def _meets(version: tuple[int, ...], operator: str, other: tuple[int, ...]) -> bool:
    if version == other:
        return operator in (">=", "<=", "==")
    return operator in ((">=", ">", "!=") if version > other else ("<=", "<", "!="))


def _numbers(text: str) -> tuple[int, ...]:
    """1.20.0 and 1.20 are the same release."""
    numbers = list(map(int, text.split(".")))
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)


@cache
def satisfies(requirements: tuple[str, ...], stated: str) -> bool:
    """Whether "name 1.2" meets one of the requirements, such as "name>=1"."""
    name, _, version = stated.partition(" ")
    parsed = map(parsed_requirement, requirements)
    return bool(version) and any(
        one.name == name and within(version, one.specifier) for one in parsed
    )


@cache
def parsed_requirement(text: str) -> Requirement:
    """A PEP 508 requirement. Raises packaging's InvalidRequirement, a ValueError."""
    plain = PLAIN.fullmatch(text)
    if plain:
        return Requirement(plain[1], (plain[2] or "").strip())
    from packaging import requirements  # noqa: PLC0415  # off the path of plain requirements

    parsed = requirements.Requirement(text)
    return Requirement(parsed.name, str(parsed.specifier), parsed.marker)
