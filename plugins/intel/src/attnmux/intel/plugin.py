"""What attnmux-intel offers: the probe of Intel devices; no backend yet."""

from __future__ import annotations

from attnmux.core.choosing.card import BackendCard
from attnmux.core.choosing.platform import Platform
from attnmux.core.choosing.plugins import hookimpl
from attnmux.intel.probe import probe


@hookimpl
def attnmux_platforms() -> list[Platform]:
    return probe()


@hookimpl
def attnmux_cards() -> list[BackendCard]:
    return []
