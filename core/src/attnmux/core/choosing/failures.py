"""What did not work, as a row of a report."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import Literal

Stage = Literal["load", "platforms", "cards"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PluginFailure:
    """A plugin, or one of its hooks, that did not work. The others go on."""

    plugin: str
    distribution: str
    version: str
    stage: Stage
    error: str
    """Type and message, in one line."""
    traceback: str = ""

    def __str__(self) -> str:
        source = f"{self.distribution} {self.version}".strip()
        return f"plugin {self.plugin} ({source or 'of no distribution'}): {self.error}"


def failure_of(
    plugin: str, distribution: str, version: str, stage: Stage, error: BaseException
) -> PluginFailure:
    """What was raised, as a row of the report."""
    try:
        said = str(error)
    except Exception:
        said = "what it says cannot be read"
    return PluginFailure(
        plugin=plugin,
        distribution=distribution,
        version=version,
        stage=stage,
        error=" ".join(f"{type(error).__name__}: {said}".split()),
        traceback="".join(traceback.format_exception(error)),
    )
