"""The hooks that a plugin may implement."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from attnmux.core.cards.advisory import Advisory
    from attnmux.core.cards.card import BackendCard
    from attnmux.core.cards.figures import Figures
    from attnmux.core.facts.platform import Platform

hookspec = pluggy.HookspecMarker("attnmux")
hookimpl = pluggy.HookimplMarker("attnmux")


class HookSpecs:
    """Functions of a plugin's module, marked with `hookimpl`."""

    @hookspec
    def attnmux_platforms(self) -> list[Platform]:
        """The devices of this machine that the plugin serves, [] if there are none.

        It runs in a child process with a limit on time, and must not create a device context. Its
        exceptions become rows in the report.
        """
        return []

    @hookspec
    def attnmux_cards(self) -> list[BackendCard]:
        """The cards of the plugin's backends. Must import neither torch nor a kernel library."""
        return []

    @hookspec
    def attnmux_figures(self) -> list[Figures]:
        """The files of figures in the plugin's wheel, mostly `Figures.in_folder`. They are read for
        a device of their kind alone."""
        return []

    @hookspec
    def attnmux_advisories(self) -> list[Advisory]:
        """Findings about releases of kernel libraries, mostly `Advisory.in_folder`. They hold for
        every plugin's backends."""
        return []


HOOKS = ("attnmux_platforms", "attnmux_cards", "attnmux_figures", "attnmux_advisories")
