"""What each backend lacks to run here, as `attnmux doctor` lists it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from attnmux.core.choosing.ask.policy import Policy
from attnmux.core.choosing.common.plain import Plain, plain
from attnmux.core.choosing.common.verdict import Reason
from attnmux.core.choosing.find.examine import Plugin
from attnmux.core.choosing.find.plugins import Plugins
from attnmux.core.choosing.judge.checking import install_hint, standing
from attnmux.core.choosing.offer.card import BackendCard, Offer
from attnmux.core.choosing.offer.libraries import (
    Requirement,
    installed_version,
    parsed_requirement,
    specifiers,
    within,
)
from attnmux.core.choosing.offer.proof import Proof, proven

STATES = ("present", "too old", "too new", "missing")
"""Of a required library, best first."""
LOWER_BOUNDS = (">=", ">", "~=", "==")


@dataclass(frozen=True, kw_only=True, slots=True)
class Library(Plain):
    """A requirement of a card, and the closest of its alternatives."""

    wanted: str
    installed: str
    """Name and version; empty where it is missing."""
    state: str
    """One of STATES."""
    hint: str
    """The command that installs it; empty where it is present."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Backend:
    """A backend, the reasons that bar it from any request, and its libraries."""

    offer: Offer
    reasons: tuple[Reason, ...]
    libraries: tuple[Library, ...]

    @property
    def vendors(self) -> list[str]:
        """Those that the card serves; empty where a clause does not list them."""
        listed = [clause.vendor.examples() for clause in self.offer.card.clauses]
        return sorted({str(name) for names in listed for name in names}) if all(listed) else []

    @property
    def proof(self) -> Proof:
        card = self.offer.card
        return proven(card.verified_on, card.clauses).word

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.offer.card.name,
            "address": self.offer.address,
            "status": self.offer.card.status,
            "vendors": self.vendors,
            "proof": self.proof,
            "reasons": plain(self.reasons),
            "libraries": plain(self.libraries),
        }


def backends_of(plugins: Sequence[Plugin], policy: Policy) -> tuple[Backend, ...]:
    """The backends of all plugins that told theirs."""
    return tuple(
        Backend(
            offer=offer,
            reasons=tuple(standing(offer, policy, installed_version)),
            libraries=libraries(offer.card, offer.distribution),
        )
        for offer in Plugins(tuple(plugins)).offers()
    )


def libraries(card: BackendCard, distribution: str) -> tuple[Library, ...]:
    """The requirements of the card, except those whose marker does not hold here."""
    found = []
    for alternatives in card.requirements():
        parsed = [parsed_requirement(text) for text in alternatives]
        here = [one for one in parsed if one.marker is None or one.marker.evaluate()]
        if len(here) < len(parsed):
            continue
        states = [(*_state(one), one) for one in here]
        state, version, closest = min(states, key=lambda row: STATES.index(row[0]))
        hint = "" if state == "present" else install_hint(card, distribution, alternatives[0])
        installed = f"{closest.name} {version}" if version else ""
        wanted = " or ".join(alternatives)
        found.append(Library(wanted=wanted, installed=installed, state=state, hint=hint))
    return tuple(found)


def _state(requirement: Requirement) -> tuple[str, str]:
    version = installed_version(requirement.name)
    if version is None:
        return "missing", ""
    if within(version, requirement.specifier):
        return "present", version
    older = any(
        bound.operator in LOWER_BOUNDS
        and not within(version, f">={bound.version.removesuffix('.*')}")
        for bound in specifiers(requirement.specifier)
    )
    return ("too old" if older else "too new"), version
