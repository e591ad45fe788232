"""Installed distributions, found without importing them, and the version ranges they may meet."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cache
from typing import Protocol

import importlib_metadata
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion

Libraries = Callable[[str], "str | None"]
"""A distribution's name → its installed version, None where it is not installed."""

Unreadable = Sequence[tuple[str, Exception]]
"""Distributions by name, and why their entry points cannot be read."""


class Distribution(Protocol):
    """The part of importlib_metadata's distributions that is read here."""

    def read_text(self, filename: str) -> str | None: ...


def installed_version(distribution: str) -> str | None:
    """The version in this environment."""
    try:
        return identity(importlib_metadata.distribution(distribution))[1] or "unknown"
    except importlib_metadata.PackageNotFoundError:
        return None


def identity(distribution: Distribution | None) -> tuple[str, str]:
    """(name, version), from the first lines of the distribution's metadata; empty where unknown.

    `Distribution.name` parses the whole file with `email`, whose import alone costs more than all
    of choosing.
    """
    if distribution is None:
        return "", ""
    try:
        text = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or ""
    except UnicodeDecodeError:
        return "", ""
    headers: dict[str, str] = {}
    for line in text.splitlines():
        name, colon, value = line.partition(":")
        if not colon or {"Name", "Version"} <= headers.keys():
            break
        headers.setdefault(name, value.strip())
    return headers.get("Name", ""), headers.get("Version", "")


def entry_points(group: str) -> tuple[Sequence[importlib_metadata.EntryPoint], Unreadable]:
    """The entry points of a group, and the distributions whose entry points cannot be read.

    The library's own search raises as soon as one installed distribution has a damaged file.
    """
    try:
        return tuple(importlib_metadata.entry_points(group=group)), ()
    except Exception:
        return _one_by_one(group)


def _one_by_one(group: str) -> tuple[Sequence[importlib_metadata.EntryPoint], Unreadable]:
    found: dict[str, Sequence[importlib_metadata.EntryPoint]] = {}
    unreadable = []
    for distribution in importlib_metadata.distributions():
        name = identity(distribution)[0]
        try:
            # The first on the path hides others of its name
            found.setdefault(name, tuple(distribution.entry_points.select(group=group)))
        except Exception as error:
            if _mentions(distribution, group):
                unreadable.append((name, error))
    return [point for points in found.values() for point in points], unreadable


def _mentions(distribution: Distribution, group: str) -> bool:
    """Whether damaged entry points may belong to the group."""
    try:
        return f"[{group}]" in (distribution.read_text("entry_points.txt") or "")
    except UnicodeDecodeError:
        return True


def assumed(without: Collection[str], libraries: Libraries, everything: bool) -> Libraries:
    """`libraries` less those in `without`; with `everything`, any other counts as new enough.

    "New enough" is the version "", which meets every range.
    """
    absent = set(map(canonicalize_name, without))

    def version(distribution: str) -> str | None:
        if canonicalize_name(distribution) in absent:
            return None
        return "" if everything else libraries(distribution)

    return version


# Parsing would dominate a check: every text is read once.
@cache
def specifiers(text: str) -> SpecifierSet:
    """A version range as in PEP 440. Raises packaging's InvalidSpecifier."""
    return SpecifierSet(text)


@cache
def within(version: str, specifier: str) -> bool:
    """Whether a range contains a version, pre-releases included. An unreadable version is only in
    the empty range."""
    try:
        return specifiers(specifier).contains(version, prereleases=True)
    except InvalidVersion:
        return not specifier


@cache
def satisfies(requirements: tuple[str, ...], stated: str) -> bool:
    """Whether "name 1.2" meets one of the requirements, such as "name>=1"."""
    name, _, version = stated.partition(" ")
    parsed = (parsed_requirement(requirement) for requirement in requirements)
    return bool(version) and any(
        one.name == name and within(version, str(one.specifier)) for one in parsed
    )


@cache
def parsed_requirement(text: str) -> Requirement:
    """A PEP 508 requirement. Raises packaging's InvalidRequirement."""
    return Requirement(text)
