"""What attnmux-triton offers. No backend yet, and never a platform: Triton belongs to no vendor."""

from __future__ import annotations

from attnmux.core.choosing.card import BackendCard
from attnmux.core.choosing.plugins import hookimpl


@hookimpl
def attnmux_cards() -> list[BackendCard]:
    return []
