"""The backends of a decision without a pass of the conformance suite."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from attnmux.core.cards.card import Offer
from attnmux.core.cards.proof import Proven, doubt
from attnmux.core.choosing.choice import Choice
from attnmux.core.choosing.decision import Decision
from attnmux.core.choosing.parts import installed_part
from attnmux.core.facts.platform import Platform
from attnmux.core.facts.request import Request
from attnmux.core.measured.store import Store

if TYPE_CHECKING:
    from attnmux.core.measured.measurement import Measurement

NOTHING_KEPT = Store(None)
NOT_HERE = "it has not passed the suite here with its present files"


@dataclass(frozen=True, kw_only=True, slots=True)
class Unverified:
    """A backend that was chosen, and why a pass of the suite is missing."""

    offer: Offer
    choice: Choice
    request: Request
    """The request that it was chosen for: the decision's, or a part's."""
    phases: tuple[str, ...]
    reason: str

    def __str__(self) -> str:
        address = self.offer.address
        tried = f"`attnmux verify {address} --keep` tries it"
        return f"{address} was chosen, but {self.reason}; {tried}"

    @staticmethod
    def untried(
        decision: Decision, offers: Sequence[Offer], kept: Store = NOTHING_KEPT
    ) -> tuple[Unverified, ...]:
        """Backends that the user did not name and whose suite did not pass here with their present
        files, whatever their cards say."""
        found = [
            each if each.reason else replace(each, reason=NOT_HERE)
            for each in chosen(decision, offers)
            if not each.choice.origin
        ]
        return tuple(_without_pass(found, decision.platform, kept))

    @staticmethod
    def by_cards(
        decision: Decision,
        offers: Sequence[Offer],
        measurements: Sequence[Measurement],
        kept: Store = NOTHING_KEPT,
    ) -> tuple[Unverified, ...]:
        """Backends that the user did not name and that never passed the suite: not on this kind of
        device, by their cards, and not here, by the measurements of the installed versions and by
        the passes that were kept."""
        passed = {
            (measurement.backend, name, version)
            for measurement in measurements
            if measurement.conformant
            for name, version in measurement.versions.items()
        }
        found = [
            each
            for each in doubtful(decision, offers)
            if not each.choice.origin
            and (each.offer.address, each.offer.distribution, each.choice.version) not in passed
        ]
        return tuple(_without_pass(found, decision.platform, kept))


def _without_pass(
    found: Sequence[Unverified], platform: Platform, kept: Store
) -> Iterator[Unverified]:
    passed = kept.read() if found else {}
    if passed:
        from attnmux.core.measured.passes import Passes  # noqa: PLC0415  # few keep passes
    for each in found:
        if not passed or Passes.key(each.offer, platform, each.choice.options) not in passed:
            yield each


def doubtful(decision: Decision, offers: Sequence[Offer]) -> Iterator[Unverified]:
    """The chosen backends that their cards do not prove."""
    return (each for each in chosen(decision, offers) if each.reason)


def chosen(decision: Decision, offers: Sequence[Offer]) -> Iterator[Unverified]:
    """The chosen backends, with an empty reason for those that their cards prove."""
    by_address = {offer.address: offer for offer in offers}
    served: dict[tuple[Choice, Request, bool], tuple[Decision, list[str]]] = {}
    for of in decision.groups:
        uses = [(of.request, False, *one) for one in of.choices]
        main = {(choice.address, of.request.kind) for _, choice in of.choices}
        for request, phase, choice in part_uses(of):
            # A backend that serves such layers anyway is told once
            if (choice.address, request.kind) not in main:
                uses.append((request, True, phase, choice))
        for request, is_of_part, phase, choice in uses:
            served.setdefault((choice, request, is_of_part), (of, []))[1].append(phase)
    for (choice, request, is_of_part), (of, all_phases) in served.items():
        offer = by_address[choice.address]
        phases = tuple(dict.fromkeys(all_phases))
        reason = doubt(offer.card.verified_on, decision.platform, phases, request.kind)
        if reason:
            reason += passed_over(of, offer, () if is_of_part else phases, by_address)
        yield Unverified(offer=offer, choice=choice, request=request, phases=phases, reason=reason)


def part_uses(decision: Decision) -> Iterator[tuple[Request, str, Choice]]:
    """(what it was chosen for, phase, choice) of each backend that the parts of one group use."""
    for name, served in decision.parts.items():
        part = installed_part(name)
        asks = {} if part is None else part.asks(decision.request)
        for ask, phases in served.items():
            if ask in asks:
                yield from ((asks[ask].request, *one) for one in phases.items())


def passed_over(
    decision: Decision, chosen: Offer, phases: Sequence[str], offers: Mapping[str, Offer]
) -> str:
    """The backends that fit for these phases and ran on a device, in words, if the chosen one
    ran on none; else empty. offers: by address."""
    layers = decision.request.kind
    if Proven.on(chosen.card.verified_on, decision.platform, phases, layers).is_on_a_device:
        return ""
    fitting = [
        candidate
        for candidate in decision.candidates
        if candidate.phase in phases and candidate.eligible
    ]
    found: dict[str, str] = {}
    for verdict in sorted(fitting, key=lambda each: each.rank or 0):
        offer = offers.get(verdict.address)
        if offer is None or offer is chosen:
            continue
        proof = Proven.on(offer.card.verified_on, decision.platform, (verdict.phase,), layers)
        if proof.is_on_a_device:
            found[verdict.address] = f"{verdict.backend} ({proof.devices})"
    names = ", ".join(found.values())
    return f"; it ranks above {names}, which ran on a device" if found else ""
