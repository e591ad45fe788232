"""What attnmux-amd offers, as data: the probe of AMD devices, and its backends.

A card stands in a module of its own, `cards/<backend>.py`. Importing this module imports no torch.
"""

from __future__ import annotations

from attnmux.amd.cards import CARDS
from attnmux.amd.probe import probe
from attnmux.core.choosing.card import BackendCard
from attnmux.core.choosing.platform import Platform
from attnmux.core.choosing.plugins import hookimpl


@hookimpl
def attnmux_platforms() -> list[Platform]:
    return probe()


@hookimpl
def attnmux_cards() -> list[BackendCard]:
    return [*CARDS]
