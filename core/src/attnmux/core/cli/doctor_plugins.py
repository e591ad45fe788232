"""The plugins of this machine and their backends, as `attnmux doctor` lists them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from attnmux.core.choosing.ask.policy import Policy
from attnmux.core.choosing.find.examine import Entry, PluginFailure, examine
from attnmux.core.choosing.find.plugins import Plugins
from attnmux.core.choosing.judge.checking import install_hint, standing
from attnmux.core.choosing.machine.platform import Platform
from attnmux.core.choosing.offer.card import BackendCard, Offer
from attnmux.core.choosing.offer.libraries import (
    Requirement,
    installed_version,
    parsed_requirement,
    specifiers,
    within,
)
from attnmux.core.choosing.offer.proof import proven
from attnmux.core.settings import Settings

STATES = ("present", "too old", "too new", "missing")
"""Of a required library, best first."""
LOWER_BOUNDS = (">=", ">", "~=", "==")


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosed:
    """A plugin's answers, as far as it gave them."""

    plugin: str
    distribution: str
    version: str
    backends: tuple[Mapping[str, Any], ...] = ()
    """Name, address, status, vendors, proof, reasons and libraries of each."""
    cards: tuple[BackendCard, ...] = ()
    platforms: tuple[Platform, ...] = ()
    failures: tuple[PluginFailure, ...] = ()

    @property
    def status(self) -> str:
        return "broken" if self.failures else "works"


def diagnosed(entries: Sequence[Entry], settings: Settings, seconds: float) -> list[Diagnosed]:
    """Every plugin, asked anew for cards and devices."""
    policy = Policy(allow=settings.allow_backends, deny=settings.deny_backends)
    examined = examine(entries, ("cards", "platforms"), seconds)
    plugins = Plugins(tuple(examined))
    offers = plugins.offers()
    return [
        Diagnosed(
            plugin=each.entry.plugin,
            distribution=each.entry.distribution,
            version=each.entry.version,
            backends=tuple(_backend(o, policy) for o in offers if o.plugin == each.entry.plugin),
            cards=each.cards,
            platforms=each.platforms,
            failures=each.failures,
        )
        for each in examined
    ]


def _backend(offer: Offer, policy: Policy) -> dict[str, Any]:
    reasons = standing(offer, policy, installed_version)
    return {
        "name": offer.card.name,
        "address": offer.address,
        "status": offer.card.status,
        "vendors": _vendors(offer.card),
        "proof": proven(offer.card.verified_on, offer.card.clauses).word,
        "reasons": [asdict(reason) for reason in reasons],
        "libraries": libraries(offer.card, offer.distribution),
    }


def _vendors(card: BackendCard) -> list[str]:
    """The vendors that the card serves; empty where a clause does not list them."""
    listed = [clause.vendor.examples() for clause in card.clauses]
    return sorted({str(name) for names in listed for name in names}) if all(listed) else []


def libraries(card: BackendCard, distribution: str) -> list[dict[str, str]]:
    """Each requirement of the card: wanted, installed, state, and the command that fixes it.

    The state is that of the closest alternative: "present", "too old", "too new" or "missing".
    Requirements whose marker does not hold here are skipped.
    """
    rows = []
    for alternatives in card.requirements():
        parsed = [parsed_requirement(text) for text in alternatives]
        here = [one for one in parsed if one.marker is None or one.marker.evaluate()]
        if len(here) < len(parsed):
            continue
        states = [(*_state(one), one) for one in here]
        state, version, closest = min(states, key=lambda row: STATES.index(row[0]))
        hint = "" if state == "present" else install_hint(card, distribution, alternatives[0])
        rows.append(
            {
                "wanted": " or ".join(alternatives),
                "installed": f"{closest.name} {version}".strip() if version else "",
                "state": state,
                "hint": hint,
            }
        )
    return rows


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
