"""An installed plugin, and the reason why one does not work."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from attnmux.core.facts.frozen import Plain

# The child that asks for devices reads no card, and starts in half the time
if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from attnmux.core.cards.advisory import Advisory
    from attnmux.core.cards.card import BackendCard
    from attnmux.core.cards.figures import Figures
    from attnmux.core.facts.platform import Platform

MOST_ERROR = 1000
LONGEST_TRACEBACK = 20_000

Stage = Literal["load", "cards", "figures", "advisories", "platforms"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PluginFailure(Plain):
    """A plugin, or one of its hooks, that did not work. The others continue."""

    plugin: str
    distribution: str
    version: str
    stage: Stage
    error: str
    """Type and message, in one line."""
    traceback: str = ""

    def __str__(self) -> str:
        from attnmux.core.facts.libraries import release  # noqa: PLC0415  # not in the child

        source = release(self.distribution, self.version)
        return f"plugin {self.plugin} ({source or 'of no distribution'}): {self.error}"


class Plugin(NamedTuple):
    """An entry point with its distribution, and the answers of its hooks."""

    point: EntryPoint
    distribution: str = ""
    version: str = ""
    cards: tuple[BackendCard, ...] = ()
    figures: tuple[Figures, ...] = ()
    advisories: tuple[Advisory, ...] = ()
    probes: bool = False
    """Whether the plugin implements the probe."""
    platforms: tuple[Platform, ...] = ()
    failures: tuple[PluginFailure, ...] = ()
    seconds: float = 0.0
    """How long loading took in a child process; 0 if it was not measured."""
    imports_torch: bool = False
    """Whether loading imported torch, in a child process."""

    @property
    def name(self) -> str:
        return self.point.name

    @property
    def release(self) -> str:
        from attnmux.core.facts.libraries import release  # noqa: PLC0415  # not in the child

        return release(self.distribution, self.version)

    @property
    def key(self) -> str:
        """Unique, also for sorting."""
        return f"{self.name} = {self.point.value} ({self.distribution} {self.version})"


def failure_of(plugin: Plugin, stage: Stage, error: BaseException) -> PluginFailure:
    """The exception as a row of the report."""
    try:
        message = str(error)
    except BaseException:  # it is the plugin's own code that fails
        message = "its message cannot be read"
    try:
        trace = "".join(traceback.format_exception(error))
    except BaseException:
        trace = "".join(traceback.format_tb(error.__traceback__))
    return failed(plugin, stage, f"{type(error).__name__}: {message}", trace)


def failed(plugin: Plugin, stage: Stage, error: str, trace: str = "") -> PluginFailure:
    """A row of the report that obeys no terminal's control characters."""
    from attnmux.core.facts.libraries import printable  # noqa: PLC0415  # few plugins fail

    return PluginFailure(
        plugin=plugin.name,
        distribution=plugin.distribution,
        version=plugin.version,
        stage=stage,
        error=printable(" ".join(error[:MOST_ERROR].split())),
        traceback="\n".join(map(printable, trace[-LONGEST_TRACEBACK:].splitlines())),
    )
