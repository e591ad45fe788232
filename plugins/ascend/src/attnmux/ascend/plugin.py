"""What attnmux-ascend offers: the probe of Ascend devices; no backend yet."""

from __future__ import annotations

from attnmux.ascend.probe import probe
from attnmux.core.choosing.card import BackendCard
from attnmux.core.choosing.platform import Platform
from attnmux.core.choosing.plugins import hookimpl


@hookimpl
def attnmux_platforms() -> list[Platform]:
    return probe()


@hookimpl
def attnmux_cards() -> list[BackendCard]:
    return []
