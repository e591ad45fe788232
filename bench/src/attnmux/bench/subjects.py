"""Which backends are timed for a request, at which page size, and why the others are not.

Importing this module imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from attnmux.core.choosing.ask.policy import Policy
from attnmux.core.choosing.ask.request import Request
from attnmux.core.choosing.common.verdict import Reason
from attnmux.core.choosing.machine.platform import Platform
from attnmux.core.choosing.offer.card import Offer
from attnmux.core.choosing.offer.named import offers_named
from attnmux.core.choosing.solver import solve
from attnmux.core.choosing.tell.choice import Choice
from attnmux.core.choosing.tell.decision import Decision
from attnmux.core.errors import NoBackend

NAMED_FOR = {"decode": "decode_backend", "extend": "prefill_backend"}
"""The field of a policy that names the backend of one phase alone."""

ELSEWHERE = ("vendor", "status")
"""What a refusal is about that says nothing of this machine: a backend for other vendors' devices,
or one that is only planned."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """A backend that serves a phase of the request."""

    offer: Offer
    phase: str
    decision: Decision
    """For this backend and phase alone, so that it has the page size that it prefers."""
    in_graph: bool
    """Whether its steps are timed from device graphs."""

    @property
    def choice(self) -> Choice:
        return self.decision.phases[self.phase]


@dataclass(frozen=True, kw_only=True, slots=True)
class Refused:
    """A backend that does not serve a phase of the request here."""

    offer: Offer
    phase: str
    reasons: tuple[Reason, ...]
    """Where nothing else is said, that others do not go along with the backend."""

    @property
    def why(self) -> str:
        return str(self.reasons[0]) if self.reasons else "does not serve this as it is asked"


def find_subjects(
    request: Request,
    platform: Platform,
    offers: Sequence[Offer],
    policy: Policy,
    *,
    names: Sequence[str] = (),
    phases: Sequence[str] = ("decode", "extend"),
    graphs: bool = False,
) -> tuple[list[Subject], list[Refused]]:
    """Who is timed and who is not. Planned backends and those for other vendors' devices are in
    neither, unless they are among `names`, which stand for all backends where there are none.

    graphs: whether the device has graphs. Decode is timed from one where the card declares graphs.
    Raises UnknownBackend and InvalidInput for names that cannot be used.
    """
    meant = {offer.address: offer for name in names for offer in offers_named(name, offers)}
    subjects, refused = [], []
    for offer in meant.values() if names else offers:
        for phase in phases:
            in_graph = graphs and phase == "decode"
            answer = _alone(request, platform, offers, policy, offer, phase, in_graph)
            if not _serves(answer, offer, phase) and in_graph and not request.graph:
                in_graph = False
                answer = _alone(request, platform, offers, policy, offer, phase, in_graph)
            if isinstance(answer, Decision) and _serves(answer, offer, phase):
                subjects.append(
                    Subject(offer=offer, phase=phase, decision=answer, in_graph=in_graph)
                )
                continue
            reasons = _reasons(answer, offer)
            if names or not any(reason.axis in ELSEWHERE for reason in reasons):
                refused.append(Refused(offer=offer, phase=phase, reasons=reasons))
    return subjects, refused


def _alone(
    request: Request,
    platform: Platform,
    offers: Sequence[Offer],
    policy: Policy,
    offer: Offer,
    phase: str,
    in_graph: bool,
) -> Decision | NoBackend:
    """One phase, with one backend named: nothing that is asked changes."""
    asked = request.replace(phases=(phase,))
    if in_graph:
        asked = asked.replace(graph=True)
    nobody = dict.fromkeys(("backend", *NAMED_FOR.values(), "mm_backend"))
    named = {**nobody, NAMED_FOR[phase]: offer.address}
    alone = replace(policy, **named, allow_coercion=False)  # type: ignore[arg-type]  # names by field
    try:
        return solve(asked, platform, offers, alone)
    except NoBackend as refusal:
        return refusal


def _serves(answer: Decision | NoBackend, offer: Offer, phase: str) -> bool:
    """Whether it is the backend itself that serves the phase, and no companion of it."""
    return isinstance(answer, Decision) and answer.phases[phase].address == offer.address


def _reasons(answer: Decision | NoBackend, offer: Offer) -> tuple[Reason, ...]:
    """What stands against the backend."""
    for verdict in answer.candidates:
        if (verdict.plugin, verdict.backend) == (offer.plugin, offer.card.name):
            return verdict.reasons
    return ()
