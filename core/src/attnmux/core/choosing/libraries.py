"""Whether the libraries that a card requires are installed, asked without importing them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import importlib_metadata
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from attnmux.core.choosing.common.verdict import Reason
from attnmux.core.choosing.offer.card import BackendCard
from attnmux.core.choosing.offer.libraries import parsed_requirement, within

Libraries = Callable[[str], "str | None"]
"""A distribution's name → its installed version, None where it is not installed."""


def installed_version(distribution: str) -> str | None:
    """The version in this environment."""
    try:
        return identity(importlib_metadata.distribution(distribution))[1] or "unknown"
    except importlib_metadata.PackageNotFoundError:
        return None


class Distribution(Protocol):
    """What is asked of a distribution of `importlib_metadata`."""

    def read_text(self, filename: str) -> str | None: ...


def identity(distribution: Distribution | None) -> tuple[str, str]:
    """(name, version), from the first lines of the distribution's metadata; empty where unknown.

    `Distribution.name` parses the whole file with `email`, whose import alone costs more than
    every question that choosing asks.
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


Unreadable = Sequence[tuple[str, Exception]]
"""Distributions by name, and why their entry points cannot be read."""


def entry_points(group: str) -> tuple[Sequence[importlib_metadata.EntryPoint], Unreadable]:
    """The entry points of a group, and the distributions whose own cannot be read.

    One damaged file among all that is installed makes the library's own search raise.
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
    """Whether damaged entry points may be of the group: others are not our business."""
    try:
        return f"[{group}]" in (distribution.read_text("entry_points.txt") or "")
    except UnicodeDecodeError:
        return True


def assumed(without: Collection[str], libraries: Libraries, everything: bool) -> Libraries:
    """`libraries` less those in `without`; with `everything`, any other counts as new enough.

    "New enough" is said as "", a version that meets every range.
    """
    absent = set(map(canonicalize_name, without))

    def version(distribution: str) -> str | None:
        if canonicalize_name(distribution) in absent:
            return None
        return "" if everything else libraries(distribution)

    return version


def missing(card: BackendCard, libraries: Libraries, distribution: str = "") -> list[Reason]:
    """A reason for each requirement of the card that nothing installed meets."""
    reasons = []
    for alternatives in card.requirements():
        parsed = [parsed_requirement(text) for text in alternatives]
        if any(_met(requirement, libraries) for requirement in parsed):
            continue
        reasons.append(
            Reason(
                code="LIBRARY",
                axis="requires",
                wanted=" or ".join(alternatives),
                offered=", ".join(_found(requirement, libraries) for requirement in parsed),
                hint=install_hint(card, distribution, alternatives[0]),
            )
        )
    return reasons


def install_hint(card: BackendCard, distribution: str, requirement: str = "") -> str:
    """The line that installs what the card requires; empty where it requires nothing.

    It names the extra of the card's own distribution, else `requirement` or the first of the card.
    """
    if not requirement and card.requires:
        requirement = card.requirements()[0][0]
    wanted = f"{distribution}[{card.extra}]" if distribution and card.extra else requirement
    return f"pip install '{wanted}'" if wanted else ""


def _met(requirement: Requirement, libraries: Libraries) -> bool:
    if requirement.marker is not None and not requirement.marker.evaluate():
        return True
    version = libraries(requirement.name)
    if version is None:
        return False
    return not version or within(version, str(requirement.specifier))


def _found(requirement: Requirement, libraries: Libraries) -> str:
    version = libraries(requirement.name)
    return f"{requirement.name} {version}" if version else f"{requirement.name} not installed"
