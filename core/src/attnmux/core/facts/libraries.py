"""Installed distributions, found without importing them, and the version ranges they may meet."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache, lru_cache
from importlib import metadata
from typing import NamedTuple

from packaging.markers import Marker
from packaging.requirements import Requirement as ParsedRequirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

Libraries = Callable[[str], "str | None"]
"""A distribution's name → its installed version, None if it is not installed."""

Unreadable = Sequence[tuple[str, Exception]]
"""Distributions by name, and why their entry points cannot be read."""


@lru_cache(maxsize=4096)
def release(distribution: str, version: str) -> str:
    """Its name and its version, of which either may be unknown, as users read them."""
    return f"{distribution} {version}".strip()


def canonical(name: str) -> str:
    """A distribution's name as PEP 503 normalises it."""
    return canonicalize_name(name)


def printable(text: str) -> str:
    """`text` with every control character escaped, so that a terminal obeys none."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


@lru_cache(maxsize=1024)
def identity(distribution: metadata.Distribution | None) -> tuple[str, str]:
    """(name, version); empty if the metadata does not tell."""
    try:
        if distribution is None:
            return "", ""
        headers = distribution.metadata
        return printable(headers["Name"] or ""), printable(headers["Version"] or "")
    except Exception:  # it is damaged
        return "", ""


def distributions() -> Mapping[str, metadata.Distribution]:
    """The distributions on `sys.path`, by canonical name. The first of a name hides the others."""
    by_name: dict[str, metadata.Distribution] = {}
    for dist in _on_path():
        by_name.setdefault(canonical(identity(dist)[0]), dist)
    return by_name


def _on_path() -> Sequence[metadata.Distribution]:
    """All on `sys.path`, found again when it or one of its folders changes."""
    return _found(tuple((entry, _changed(entry)) for entry in sys.path))


def _changed(entry: str) -> int:
    try:
        return os.stat(entry or ".").st_mtime_ns
    except (OSError, ValueError):
        return 0


# New objects at each search would fill the cache of `identity`
@lru_cache(maxsize=4)
def _found(path: tuple[tuple[str, int], ...]) -> Sequence[metadata.Distribution]:
    return tuple(metadata.distributions())


def installed_version(distribution: str) -> str | None:
    """The version in this environment, None if it is not installed. It is read once for each
    `sys.path`."""
    return _version(canonical(distribution), tuple(sys.path))


@cache
def _version(name: str, path: tuple[str, ...]) -> str | None:
    try:
        return identity(metadata.distribution(name))[1] or "unknown"
    except metadata.PackageNotFoundError:
        return None


def entry_points(group: str) -> tuple[Sequence[metadata.EntryPoint], Unreadable]:
    """The entry points of a group, and the distributions whose entry points cannot be read."""
    by_owner: dict[str, Sequence[metadata.EntryPoint]] = {}
    unreadable: dict[str, Exception] = {}
    for distribution in _on_path():
        try:
            # Names are in files that take longer to parse, and few have entry points of the group
            if f"[{group}]" in (distribution.read_text("entry_points.txt") or ""):
                points = distribution.entry_points.select(group=group)
                by_owner.setdefault(identity(distribution)[0], [*points])
        except Exception as error:
            unreadable.setdefault(identity(distribution)[0], error)
    return [point for points in by_owner.values() for point in points], [*unreadable.items()]


def assumed(without: Collection[str], libraries: Libraries | None, is_here: bool) -> Libraries:
    """`libraries` less those in `without`.

    None: those of this environment for a platform that `is_here`; for any other, all count as new
    enough, which is the version "" that meets every range.
    """
    absent = set(map(canonical, without))
    known = installed_version if libraries is None and is_here else libraries

    def version(distribution: str) -> str | None:
        if canonical(distribution) in absent:
            return None
        return "" if known is None else known(distribution)

    return version


class Requirement(NamedTuple):
    """A PEP 508 requirement, without extras."""

    name: str
    specifier: str
    marker: Marker | None = None


@cache
def specifiers(text: str) -> SpecifierSet:
    """A version range as in PEP 440. Raises packaging's InvalidSpecifier, a ValueError."""
    return SpecifierSet(text)


# Parsing would dominate a check: every text is read once.
@cache
def within(version: str, specifier: str) -> bool:
    """Whether a range contains a version, pre-releases included. An unreadable version is only in
    the empty range. Raises as `specifiers` does."""
    allowed = specifiers(specifier)
    try:
        return allowed.contains(Version(version), prereleases=True)
    except InvalidVersion:
        return not specifier


@cache
def satisfies(requirements: tuple[str, ...], stated: str) -> bool:
    """Whether "name 1.2" meets one of the requirements, such as "name>=1"."""
    name, _, version = stated.partition(" ")
    parsed = map(parsed_requirement, requirements)
    return bool(version) and any(
        requirement.name == name and within(version, requirement.specifier)
        for requirement in parsed
    )


@cache
def parsed_requirement(text: str) -> Requirement:
    """A PEP 508 requirement. Raises packaging's InvalidRequirement, a ValueError."""
    parsed = ParsedRequirement(text)
    return Requirement(parsed.name, str(parsed.specifier), parsed.marker)
