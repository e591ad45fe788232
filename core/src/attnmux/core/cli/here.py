"""Gaps that keep each backend from this machine: libraries, a compiler, or the right build."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from attnmux.core.cards.card import BackendCard, Offer
from attnmux.core.cards.proof import Proof, Proven
from attnmux.core.choosing.checking import standing
from attnmux.core.choosing.requirements import Library, required
from attnmux.core.facts.frozen import plain
from attnmux.core.facts.libraries import Libraries, installed_version
from attnmux.core.facts.platform import Platform
from attnmux.core.facts.policy import Policy
from attnmux.core.facts.verdicts import Reason
from attnmux.core.find.cpu import COMPILERS

READY, ELSEWHERE, LACKING = "ready", "other hardware", "lacks libraries"
UNCOMPILED = "needs a compiler"
BARRED = {"CONTRACT": "other contract", "DENIED": "denied", "LIBRARY": LACKING}
"""By the code of the first reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Backend:
    """A backend, the reasons that bar it from any request, and its libraries."""

    offer: Offer
    reasons: tuple[Reason, ...]
    libraries: tuple[Library, ...]
    present: tuple[Platform, ...]
    """This machine's devices."""

    @property
    def vendors(self) -> list[str]:
        """Vendors that the card serves; empty if a clause does not list them."""
        listed = [clause.vendor.examples() for clause in self.offer.card.clauses]
        return sorted({str(name) for names in listed for name in names}) if all(listed) else []

    @property
    def here(self) -> str:
        """Whether it can run on this machine: READY, ELSEWHERE, UNCOMPILED or a word of BARRED."""
        card = self.offer.card
        if not any(map(self.fits, self.present)):
            return ELSEWHERE
        if self.reasons:
            return BARRED[self.reasons[0].code]
        return READY if any(_fits(card, device) for device in self.present) else UNCOMPILED

    def fits(self, device: Platform) -> bool:
        """Whether the card serves the device, with a C++ compiler if need be."""
        return _fits(self.offer.card, with_compiler(device))

    @property
    def proof(self) -> Proof:
        """The strongest on a device of this machine that the card serves; if it serves none, that
        for all machines that it serves."""
        card = self.offer.card
        served = [device for device in self.present if _fits(card, device)]
        words = [Proven.on(card.verified_on, device).word for device in served]
        return min(
            words or [Proven.of(card.verified_on, card.clauses).word], key=Proven.WORDS.index
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.offer.card.name,
            "address": self.offer.address,
            "vendors": self.vendors,
            "proof": self.proof,
            "here": self.here,
            "reasons": plain(self.reasons),
            "libraries": plain(self.libraries),
        }


def backends_here(
    offers: Iterable[Offer],
    policy: Policy,
    present: Iterable[Platform],
    libraries: Libraries = installed_version,
) -> tuple[Backend, ...]:
    """The offers with the gaps of each. present: this machine's devices."""
    devices = tuple(present)
    return tuple(
        Backend(
            offer=offer,
            reasons=tuple(standing(offer, policy, libraries)),
            libraries=tuple(required(offer.card, libraries, offer.distribution)),
            present=devices,
        )
        for offer in offers
    )


def lacking_compiler(cards: Iterable[BackendCard], platform: Platform) -> tuple[str, ...]:
    """A line if cards need a C++ compiler on the platform, which has none; else nothing."""
    would = with_compiler(platform)
    names = [card.name for card in cards if _fits(card, would) and not _fits(card, platform)]
    if not names:
        return ()
    return (
        f"{' and '.join(names)}: compiled at first use, and the machine has no C++ compiler "
        f"({', '.join(COMPILERS)}): apt-get install g++",
    )


def serving_builds(cards: Iterable[BackendCard], platform: Platform) -> tuple[str, ...]:
    """A line for each card with several builds, if the platform runs one of them."""
    lines = []
    for card in cards:
        if (build := card.build(platform)) and _fits(card, platform):
            lines.append(f"{card.name}: its build for {build} serves here")
    return tuple(lines)


def with_compiler(platform: Platform) -> Platform:
    """The platform, if a C++ compiler were installed."""
    return replace(platform, features=platform.features | {"cxx_compiler"})


def _fits(card: BackendCard, platform: Platform) -> bool:
    """Whether some clause admits the device. A card without clauses has a reason of its own."""
    if not card.clauses:
        return True
    version = ".".join(map(str, platform.version))
    return any(
        clause.vendor.admits(platform.vendor)
        and clause.arch.admits(platform.arch)
        and clause.features.admits(platform.features)
        and (not version or clause.version.admits(version))
        for clause in card.clauses
    )
