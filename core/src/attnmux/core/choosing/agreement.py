"""Whether a decision that another process made holds in this one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from attnmux.core.choosing.common.verdict import Reason
from attnmux.core.choosing.judge.checking import check
from attnmux.core.choosing.machine.platform import Platform
from attnmux.core.choosing.offer.card import Offer
from attnmux.core.choosing.offer.libraries import Libraries
from attnmux.core.choosing.offer.named import complete

if TYPE_CHECKING:
    from attnmux.core.choosing.tell.choice import Choice
    from attnmux.core.choosing.tell.decision import Decision


def disagreements(
    decision: Decision, platform: Platform, offers: Iterable[Offer], libraries: Libraries
) -> Iterator[str]:
    """What is otherwise here than where the decision was made, in words; none where it holds.

    All that the decision's hash covers is compared, and each backend must serve its phases here:
    a library or a feature of the machine may be missing that the hash does not name.
    """
    for field in ("vendor", "arch", "runtime"):
        here, decided = getattr(platform, field), getattr(decision.platform, field)
        if here != decided:
            yield f"{field} {here or 'unknown'} here, {decided or 'unknown'} in the decision"
    found = {offer.address: offer for offer in offers}
    served: dict[Choice, list[str]] = {}
    for phase, choice in decision.choices:
        those = served.setdefault(replace(choice, origin=""), [])
        if phase not in those:
            those.append(phase)
    for choice, phases in served.items():
        address = f"{choice.plugin}/{choice.backend}"
        if address not in found:
            yield f"{address} for {' and '.join(phases)} is offered by no plugin here"
            continue
        yield from _otherwise(choice, found[address])
        failing: dict[Reason, list[str]] = {}
        for phase in phases:
            verdict = check(
                found[address].card,
                phase,
                decision.request,
                platform,
                plugin=choice.plugin,
                libraries=libraries,
            )
            for reason in verdict.reasons:
                failing.setdefault(reason, []).append(phase)
        for reason, those in failing.items():
            yield f"{address} does not serve {' and '.join(those)} here: {reason}"


def _otherwise(choice: Choice, offer: Offer) -> Iterator[str]:
    options = complete(offer.card, {})
    for field, here, decided in (
        ("distribution", offer.distribution, choice.distribution),
        ("version", offer.version, choice.version),
        ("factory", offer.card.factory, choice.factory),
        ("options", ", ".join(sorted(options)), ", ".join(sorted(choice.options))),
    ):
        if here != decided:
            said = f"{here or 'none'} here, {decided or 'none'} in the decision"
            yield f"{offer.address}: {field} {said}"
