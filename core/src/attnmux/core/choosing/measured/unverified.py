"""The backends of a decision that never passed the conformance suite."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from attnmux.core.choosing.ask.derived import linear_request
from attnmux.core.choosing.ask.request import Request
from attnmux.core.choosing.offer.card import Offer
from attnmux.core.choosing.offer.proof import doubt, proven_on
from attnmux.core.choosing.tell.choice import Choice
from attnmux.core.choosing.tell.decision import Decision

if TYPE_CHECKING:
    from attnmux.core.choosing.measured.measurement import Measurement


@dataclass(frozen=True, kw_only=True, slots=True)
class Unverified:
    """A backend that was chosen and never ran on this kind of device, by its card."""

    offer: Offer
    choice: Choice
    request: Request
    """What it was chosen for: the decision's, or that of linear layers."""
    phases: tuple[str, ...]
    reason: str

    def __str__(self) -> str:
        address = self.offer.address
        return f"{address} was chosen, but {self.reason}; `attnmux verify {address}` tries it"


def unverified(
    decision: Decision, offers: Sequence[Offer], measurements: Sequence[Measurement]
) -> tuple[Unverified, ...]:
    """Backends that the user did not name and that never passed the suite: not on this kind of
    device, by their cards, and not here with the installed versions, by the measurements."""
    passed = {
        (each.backend, name, version)
        for each in measurements
        if each.conformant
        for name, version in each.versions.items()
    }
    return tuple(
        each
        for each in doubtful(decision, offers)
        if not each.choice.origin
        and (each.offer.address, each.offer.distribution, each.choice.version) not in passed
    )


def doubtful(decision: Decision, offers: Sequence[Offer]) -> Iterator[Unverified]:
    """The chosen backends that their cards do not prove."""
    by_address = {offer.address: offer for offer in offers}
    uses = [(each, "", *one) for each in decision.groups for one in each.choices]
    uses += [
        (decision, kind, *one) for kind in decision.linear for one in decision.linear[kind].items()
    ]
    chosen: dict[tuple[Choice, str, Request], tuple[Decision, list[str]]] = {}
    for of, kind, phase, choice in uses:
        chosen.setdefault((choice, kind, of.request), (of, []))[1].append(phase)
    for (choice, kind, request), (of, served) in chosen.items():
        offer = by_address[choice.address]
        phases = tuple(dict.fromkeys(served))
        layers = kind or request.kind
        reason = doubt(offer.card.verified_on, decision.platform, phases, layers)
        if reason:
            yield Unverified(
                offer=offer,
                choice=choice,
                request=linear_request(request, kind) if kind else request,
                phases=phases,
                reason=reason + passed_over(of, offer, () if kind else phases, by_address),
            )


def passed_over(
    decision: Decision, chosen: Offer, phases: Sequence[str], offers: Mapping[str, Offer]
) -> str:
    """The backends that fit for these phases and ran on a device, in words, where the chosen one
    ran on none; else empty. offers: by address."""
    layers = decision.request.kind
    if proven_on(chosen.card.verified_on, decision.platform, phases, layers).is_on_a_device:
        return ""
    fitting = [each for each in decision.candidates if each.phase in phases and each.eligible]
    found: dict[str, str] = {}
    for verdict in sorted(fitting, key=lambda each: each.rank or 0):
        offer = offers.get(verdict.address)
        if offer is None or offer is chosen:
            continue
        proof = proven_on(offer.card.verified_on, decision.platform, (verdict.phase,), layers)
        if proof.is_on_a_device:
            found[verdict.address] = f"{verdict.backend} ({proof.devices})"
    names = ", ".join(found.values())
    return f"; it ranks above {names}, which ran on a device" if found else ""
