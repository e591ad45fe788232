"""What attnmux-ascend offers, as data: the probe of Ascend devices, and its backends.

Each card has its own module, `cards/<backend>.py`. Importing this module imports no torch.
"""

from __future__ import annotations

from attnmux.ascend.cards import CARDS
from attnmux.ascend.probe import probe
from attnmux.core.choosing.find.plugins import hookimpl
from attnmux.core.choosing.machine.platform import Platform
from attnmux.core.choosing.offer.card import BackendCard


@hookimpl
def attnmux_platforms() -> list[Platform]:
    return probe()


@hookimpl
def attnmux_cards() -> list[BackendCard]:
    return [*CARDS]
