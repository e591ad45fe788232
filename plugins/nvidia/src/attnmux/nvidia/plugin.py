"""What attnmux-nvidia offers: the probe of NVIDIA devices through NVML, and its backends.

A card is data and stands in a module of its own, `cards/<backend>.py`. Importing this module
imports neither torch nor a kernel library.
"""

from __future__ import annotations

from attnmux.core.choosing.card import BackendCard
from attnmux.core.choosing.platform import Platform
from attnmux.core.choosing.plugins import hookimpl
from attnmux.nvidia.cards import CARDS
from attnmux.nvidia.probe import probe


@hookimpl
def attnmux_platforms() -> list[Platform]:
    return probe()


@hookimpl
def attnmux_cards() -> list[BackendCard]:
    return [*CARDS]
