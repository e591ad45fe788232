"""The libraries that a card requires, which of them are here, and how to install the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from attnmux.core.cards.card import BackendCard
from attnmux.core.facts.frozen import Plain
from attnmux.core.facts.libraries import (
    Libraries,
    Requirement,
    parsed_requirement,
    release,
    specifiers,
    within,
)
from attnmux.core.facts.platform import Platform

STATES = ("present", "too old", "too new", "missing")
"""States of a required library, best first."""
LOWER_BOUNDS = (">=", ">", "~=", "==")


@dataclass(frozen=True, kw_only=True, slots=True)
class Library(Plain):
    """A requirement of a card, and the closest of its alternatives."""

    wanted: str
    installed: str
    """Name and version; empty if it is missing."""
    state: str
    """One of STATES."""
    offered: str
    """The installed version of each alternative, in words."""
    hint: str
    """The command that installs it; empty if it is present."""


def required(card: BackendCard, libraries: Libraries, distribution: str) -> Iterator[Library]:
    """The requirements of the card, except those with an alternative whose marker does not hold
    here. distribution: the card's own, for the hints."""
    for alternatives, parsed in _needed_here(card.requirements()):
        versions, states = _standing(parsed, libraries)
        state = min(states, key=STATES.index)
        name, version = versions[states.index(state)]
        yield Library(
            wanted=" or ".join(alternatives),
            installed="" if version is None else release(name, version),
            state=state,
            offered=", ".join(f"{name} {version or 'not installed'}" for name, version in versions),
            hint="" if state == "present" else install_hint(card, distribution, alternatives[0]),
        )


@cache
def _needed_here(
    requirements: tuple[tuple[str, ...], ...],
) -> tuple[tuple[tuple[str, ...], tuple[Requirement, ...]], ...]:
    """The alternatives whose markers hold here, as text and parsed."""
    alternatives = [(texts, tuple(map(parsed_requirement, texts))) for texts in requirements]
    return tuple(
        (texts, parsed)
        for texts, parsed in alternatives
        if all(
            requirement.marker is None or requirement.marker.evaluate() for requirement in parsed
        )
    )


def caveats(card: BackendCard, platform: Platform, libraries: Libraries) -> Iterator[str]:
    """The card's caveats that hold on the platform with the installed libraries."""
    for caveat in card.caveats:
        if caveat.arch and platform.arch not in caveat.arch:
            continue
        parsed = [parsed_requirement(text) for text in caveat.unless]
        versions, states = _standing(parsed, libraries)
        if "present" not in states:
            installed = ", ".join(f"{name} {version or 'is missing'}" for name, version in versions)
            yield f"{card.name}: {caveat.text} (here: {installed})"


def install_hint(card: BackendCard, distribution: str, requirement: str = "") -> str:
    """The pip line that installs the card's requirements; empty if there are none.

    It names the extra of the card's own distribution, else `requirement` or the card's first.
    """
    if not requirement and card.requires:
        requirement = card.requirements()[0][0]
    wanted = f"{distribution}[{card.extra}]" if distribution and card.extra else requirement
    return f"pip install '{wanted}'" if wanted else ""


def _standing(
    parsed: Sequence[Requirement], libraries: Libraries
) -> tuple[list[tuple[str, str | None]], list[str]]:
    """Each alternative's name with its installed version, and its state."""
    versions = [(requirement.name, libraries(requirement.name)) for requirement in parsed]
    states = [
        _state(requirement, version)
        for requirement, (_, version) in zip(parsed, versions, strict=True)
    ]
    return versions, states


def _state(requirement: Requirement, version: str | None) -> str:
    """One of STATES. The version "" is new enough, see `assumed`."""
    if version is None:
        return "missing"
    if not version or within(version, requirement.specifier):
        return "present"
    older = any(
        bound.operator in LOWER_BOUNDS
        and not within(version, f">={bound.version.removesuffix('.*')}")
        for bound in specifiers(requirement.specifier)
    )
    return "too old" if older else "too new"
