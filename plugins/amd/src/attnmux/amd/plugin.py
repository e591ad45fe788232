"""What attnmux-amd offers: nothing yet, neither a probe of AMD devices nor a backend.

A present device is still named by core, from its device node or bus id.
"""

from __future__ import annotations

from attnmux.core.choosing.card import BackendCard
from attnmux.core.choosing.platform import Platform
from attnmux.core.choosing.plugins import hookimpl


@hookimpl
def attnmux_platforms() -> list[Platform]:
    return []


@hookimpl
def attnmux_cards() -> list[BackendCard]:
    return []
