"""Backends that must not share a KV cache: rules on two cards, which no clause of one can say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attnmux.core.choosing.offer.card import Offer
from attnmux.core.choosing.offer.named import means

Opposed = Mapping[str, frozenset[str]]
"""By address: the backends that must not serve decode where this one serves extend, and the other
way round. Only backends that a rule speaks of are in it."""


def opposed(offers: Sequence[Offer]) -> Opposed:
    """What the cards exclude, in both directions: one of two cards says it for both."""
    found: dict[str, set[str]] = {}
    for offer in offers:
        for other in offers if offer.card.excludes else ():
            if other is not offer and any(means(name, other) for name in offer.card.excludes):
                found.setdefault(offer.address, set()).add(other.address)
                found.setdefault(other.address, set()).add(offer.address)
    return {address: frozenset(others) for address, others in found.items()}
