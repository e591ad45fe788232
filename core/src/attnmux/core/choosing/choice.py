"""The backend chosen for a phase, and whether the choice also holds in another process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from attnmux.core.cards.card import Offer
from attnmux.core.choosing.checking import Accuracy, check
from attnmux.core.facts.fields import read_fields
from attnmux.core.facts.frozen import FrozenMapping
from attnmux.core.facts.libraries import Libraries
from attnmux.core.facts.platform import Platform
from attnmux.core.facts.reading import Fact
from attnmux.core.facts.request import Request
from attnmux.core.facts.values import OptionValue, TreeMask
from attnmux.core.facts.verdicts import Reason


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice(Fact):
    """The backend that serves a phase, with everything needed to build it."""

    noun = "choice"

    backend: str
    plugin: str
    factory: str
    """"module:attribute"."""
    options: Mapping[str, OptionValue] = field(default_factory=FrozenMapping)
    """Every option of the backend, defaults included."""
    distribution: str = ""
    version: str = ""
    tree_masks: tuple[TreeMask, ...] = ("full",)
    virtual_requests: bool = False
    """Both as on the card."""
    origin: str = ""
    """Source of the backend's name: user, env or config; empty for an automatic choice."""

    def __post_init__(self) -> None:
        read_fields(self, self.noun)

    @property
    def address(self) -> str:
        """`plugin/name`."""
        return f"{self.plugin}/{self.backend}"

    def __str__(self) -> str:
        """The backend with its plugin, for a person."""
        return f"{self.backend} ({self.plugin})"

    def identity(self) -> dict[str, Any]:
        """The part that the decision's hash covers: all but the origin."""
        return {name: value for name, value in self.to_dict().items() if name != "origin"}


@dataclass(frozen=True, kw_only=True, slots=True)
class SizeRange(Fact):
    """Batch sizes whose decode steps another backend serves than the phase's own."""

    noun = "sizes"

    least: int
    most: int | None
    """None: there is no largest."""
    choice: Choice
    gain: float
    """The smallest share of the time of the phase's backend that it saves at a measured size:
    0.05 is 5 %."""

    def __post_init__(self) -> None:
        read_fields(self, self.noun)

    def __str__(self) -> str:
        if self.most is None:
            return f"{self.least} and more"
        return str(self.least) if self.least == self.most else f"{self.least} to {self.most}"


def choice_of(offer: Offer, given: Mapping[str, OptionValue], origin: str = "") -> Choice:
    """The choice of an offer; `given` are its options from `read_options`, without defaults."""
    return Choice(
        backend=offer.card.name,
        plugin=offer.plugin,
        factory=offer.card.factory,
        options=offer.card.complete(given),
        distribution=offer.distribution,
        version=offer.version,
        tree_masks=offer.card.tree_masks,
        virtual_requests=offer.card.virtual_requests,
        origin=origin,
    )


def disagreements(
    choices: Iterable[tuple[str, Choice]],
    request: Request,
    decided: Platform,
    platform: Platform,
    offers: Iterable[Offer],
    libraries: Libraries,
    accuracy: Accuracy,
) -> Iterator[str]:
    """The differences between this process and the decision's, in words; none if it holds.

    They cover everything in the decision's hash. Each backend must also serve the requested phases
    here: the hash does not cover missing libraries or features of the machine. Each must be as
    accurate here as the request demands.
    """
    for name in ("vendor", "arch", "runtime"):
        here, there = getattr(platform, name), getattr(decided, name)
        if here != there:
            yield f"{name} {here or 'unknown'} here, {there or 'unknown'} in the decision"
    by_address = {offer.address: offer for offer in offers}
    served: dict[Choice, list[str]] = {}
    for phase, choice in choices:
        those = served.setdefault(replace(choice, origin=""), [])
        if phase not in those:
            those.append(phase)
    for choice, phases in served.items():
        address = choice.address
        if address not in by_address:
            yield f"{address} for {' and '.join(phases)} is offered by no plugin here"
            continue
        offer = by_address[address]
        yield from _otherwise(choice, offer)
        failing: dict[Reason, list[str]] = {}
        requested = [phase for phase in phases if phase in request.phases]
        for phase in requested:
            outcome = check(
                offer.card, phase, request, platform, plugin=choice.plugin, libraries=libraries
            )
            for reason in outcome.reasons:
                failing.setdefault(reason, []).append(phase)
        yield from (
            f"{address} does not serve {' and '.join(those)} here: {reason}"
            for reason, those in failing.items()
        )
        yield from (
            f"{address} is not accurate enough here: {reason}"
            for reason in (accuracy(offer, request) if requested else ())
        )


def _otherwise(choice: Choice, offer: Offer) -> Iterator[str]:
    if not offer.admitted:
        yield f"{offer.address} is left out by the configuration"
    options = offer.card.complete({})
    for name, here, decided in (
        ("distribution", offer.distribution, choice.distribution),
        ("version", offer.version, choice.version),
        ("factory", offer.card.factory, choice.factory),
        ("options", ", ".join(sorted(options)), ", ".join(sorted(choice.options))),
        ("virtual requests", offer.card.virtual_requests, choice.virtual_requests),
        ("masks of trees", ", ".join(offer.card.tree_masks), ", ".join(choice.tree_masks)),
    ):
        if here != decided:
            differences = f"{here or 'none'} here, {decided or 'none'} in the decision"
            yield f"{offer.address}: {name} {differences}"
