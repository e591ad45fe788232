"""Whether a backend is as accurate as the request asks, by its card."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from attnmux.core.choosing.ask.request import Request
from attnmux.core.choosing.common.verdict import Reason
from attnmux.core.choosing.offer.card import BackendCard, Offer

Accuracy = Callable[[Offer, Request], Sequence[Reason]]
"""The reasons why an offer is not as accurate as the request asks."""

UNPROVEN = "no measured error and no bound on its card (attnmux bench --keep measures it)"


def by_card(offer: Offer, request: Request) -> list[Reason]:
    """`max_error` needs a bound of the card. `accuracy="high"` refuses 8-bit products."""
    return [
        *([] if request.max_error is None else unbounded(offer.card, request, request.max_error)),
        *([] if request.accuracy is None else rounding(offer.card, request)),
    ]


def unbounded(card: BackendCard, request: Request, most: float) -> list[Reason]:
    """A reason where the card has no bound of `most` for the request's KV dtype."""
    stored = request.kv_dtype or request.dtype or ""
    bounds = [each for each in card.error_bounds if each.kv_dtype.admits(stored)]
    if any(each.max_error <= most for each in bounds):
        return []
    return [too_large(most, " or ".join(map(str, bounds)) or UNPROVEN)]


def rounding(card: BackendCard, request: Request) -> list[Reason]:
    """A reason where the kernel rounds Q and the softmax's weights to an 8-bit KV dtype."""
    stored = request.kv_dtype or ""
    if not card.fp8_products or not stored.startswith("fp8"):
        return []
    return [inaccurate(f"products in {stored}")]


def too_large(most: float, offered: str) -> Reason:
    wanted = f"an error of {most:g} roundings at most"
    return Reason(code="MAX_ERROR", axis="max_error", wanted=wanted, offered=offered)


def inaccurate(offered: str) -> Reason:
    return Reason(code="ACCURACY", axis="accuracy", wanted="high", offered=offered)
