"""What attnmux-triton offers, as data: never a platform, as Triton belongs to no vendor.

A card stands in a module of its own, `cards/<backend>.py`. Importing this module imports no torch.
"""

from __future__ import annotations

from attnmux.core.choosing.card import BackendCard
from attnmux.core.choosing.plugins import hookimpl
from attnmux.triton.cards import CARDS


@hookimpl
def attnmux_cards() -> list[BackendCard]:
    return [*CARDS]
