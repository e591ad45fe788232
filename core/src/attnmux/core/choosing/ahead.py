"""Begins what decided backends compile without layers, while weights load."""

from __future__ import annotations

import pkgutil
from collections.abc import Sequence
from contextlib import suppress

from attnmux.core.cards.card import Offer
from attnmux.core.choosing.decision import Decision


def begin_ahead(decision: Decision, offers: Sequence[Offer]) -> None:
    """Call `BackendCard.ahead` of each decided backend that has one.

    It returns at once: call it before weights are loaded. `build` waits for what it began. Reports
    no error, since the backend's factory meets the same one again.
    """
    addresses = {choice.address for _, choice in decision.choices}
    for offer in offers:
        if offer.card.ahead is not None and offer.address in addresses:
            with suppress(Exception):
                pkgutil.resolve_name(offer.card.ahead)(decision.platform)
