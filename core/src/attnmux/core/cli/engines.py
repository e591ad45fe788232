"""The line that starts an engine with attnmux: what `attnmux select --engine` prints.

An integration advertises it in the entry-point group `attnmux.engines`, as NAME = MODULE:FUNCTION.
FUNCTION(decision, model) returns the engine's own command as a list of words; `model` is a folder
or a hub id. It imports neither the engine nor torch. It raises InvalidInput for a decision that the
engine cannot follow.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from attnmux.core.choosing.find.plugins import is_admitted
from attnmux.core.choosing.offer.libraries import EntryPoint, entry_points
from attnmux.core.choosing.tell.decision import Decision
from attnmux.core.errors import InvalidInput, PluginError, in_brief
from attnmux.core.settings import Settings

GROUP = "attnmux.engines"
OWN = ("sglang", "vllm")
"""Engines of this project's integrations: no other name is suggested to pip."""
MODEL = "MODEL"
"""Stands for the model that the user did not name."""


def launch_line(
    engine: str,
    decision: Decision,
    *,
    model: str | None,
    backends: Mapping[str, str | None],
    settings: Settings,
) -> str:
    """A line for a shell. backends: those that the user named, by setting; None: not named.

    Raises InvalidInput for an engine that no installed integration starts and for a decision that
    it cannot follow, PluginError for an integration that fails.
    """
    point = _find(engine, settings)
    try:
        launch: Any = point.load()
        words = [str(word) for word in launch(decision, model or MODEL)]
    except InvalidInput:
        raise
    except Exception as error:
        whose = point.distribution.identity()[0]
        raise PluginError(f"{point.value} of {whose} failed: {in_brief(error)}") from error
    named = [f"ATTNMUX_{name.upper()}={value}" for name, value in backends.items() if value]
    return shlex.join([*named, *words])


def _find(engine: str, settings: Settings) -> EntryPoint:
    allow, deny = settings.plugin_filter()
    known = {
        point.name: point
        for point in entry_points(GROUP)[0]
        if is_admitted(point.distribution.identity()[0], allow, deny)
    }
    if engine not in known:
        expected = f"one of {', '.join(sorted(known))}" if known else "an installed integration"
        if engine in OWN:
            expected += f" (pip install attnmux-{engine} adds {engine})"
        raise InvalidInput("--engine", got=engine, expected=expected)
    return known[engine]
