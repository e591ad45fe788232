"""Builds of kernels: which serves a device, and the line that mends the lack of a compiler."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from attnmux.core.choosing.machine.cpu import COMPILERS
from attnmux.core.choosing.machine.platform import Platform
from attnmux.core.choosing.offer.card import BackendCard


def lacking_compiler(cards: Iterable[BackendCard], platform: Platform) -> tuple[str, ...]:
    """A line if cards need a C++ compiler on the platform, which has none; else nothing."""
    would = replace(platform, features=platform.features | {"cxx_compiler"})
    names = [card.name for card in cards if _fits(card, would) and not _fits(card, platform)]
    if not names:
        return ()
    return (
        f"{' and '.join(names)}: compiled at first use, and the machine has no C++ compiler "
        f"({', '.join(COMPILERS)}): apt-get install g++",
    )


def serving_builds(cards: Iterable[BackendCard], platform: Platform) -> tuple[str, ...]:
    """A line for each card with several builds, one of which the platform runs."""
    lines = []
    for card in cards:
        fitting = (each for each in card.builds if platform.features.issuperset(each.features))
        if (build := next(fitting, None)) and _fits(card, platform):
            lines.append(f"{card.name}: its build for {build.name} serves here")
    return tuple(lines)


def _fits(card: BackendCard, platform: Platform) -> bool:
    """Whether some clause admits the device."""
    return any(
        clause.vendor.admits(platform.vendor)
        and clause.arch.admits(platform.arch)
        and clause.features.admits(platform.features)
        for clause in card.clauses
    )
