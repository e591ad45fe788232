"""Backends that lack nothing but a C++ compiler, and the line that mends it."""

from __future__ import annotations

from collections.abc import Iterable

from attnmux.core.choosing.machine.cpu import COMPILERS
from attnmux.core.choosing.machine.platform import Platform
from attnmux.core.choosing.offer.card import BackendCard

COMPILER = frozenset({"cxx_compiler"})


def lacking_compiler(cards: Iterable[BackendCard], platform: Platform) -> tuple[str, ...]:
    """A line if cards need a C++ compiler on the platform, which has none; else nothing."""
    has, would = platform.features, platform.features | COMPILER
    names = [
        card.name
        for card in cards
        if card.status == "available"
        and any(
            clause.vendor.admits(platform.vendor)
            and not clause.features.admits(has)
            and clause.features.admits(would)
            for clause in card.clauses
        )
    ]
    if not names:
        return ()
    return (
        f"{' and '.join(names)}: compiled at first use, and the machine has no C++ compiler "
        f"({', '.join(COMPILERS)}): apt-get install g++",
    )
