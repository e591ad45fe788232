"""What attnmux-intel offers, as data: the probe of Intel devices, and its backends.

Each card has its own module, `cards/<backend>.py`. Importing this module imports no torch.
"""

from __future__ import annotations

from attnmux.core.choosing.find.plugins import hookimpl
from attnmux.core.choosing.machine.platform import Platform
from attnmux.core.choosing.offer.card import BackendCard
from attnmux.intel.cards import CARDS
from attnmux.intel.probe import probe


@hookimpl
def attnmux_platforms() -> list[Platform]:
    return probe()


@hookimpl
def attnmux_cards() -> list[BackendCard]:
    return [*CARDS]
