"""The answer of `attnmux doctor` for people; `--json` never imports it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Set
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from attnmux.core.choosing.offer.libraries import installed_version
from attnmux.core.cli.doctor import Diagnosis
from attnmux.core.cli.doctor_examining import Examined
from attnmux.core.cli.render import WIDTH, plain_table, render_platforms

HERE = {
    "CONTRACT": "other contract",
    "PLANNED": "planned",
    "DENIED": "denied",
    "LIBRARY": "lacks libraries",
}
"""What keeps a backend from running, by the code of the first reason."""


def report(diagnosis: Diagnosis) -> None:
    """Versions, devices, plugins, backends with their libraries, tracebacks, problems.

    Tables fit the width. What is copied from elsewhere, or to be typed, is not broken into lines.
    """
    console = Console(highlight=False, markup=False, emoji=False, width=WIDTH)
    core, torch = installed_version("attnmux-core"), installed_version("torch")
    console.print(
        f"attnmux-core {core or 'unknown'}, Python {sys.version.split()[0]}, "
        f"torch {torch or 'not installed'}"
    )
    console.print()
    render_platforms(
        diagnosis.detection.platforms,
        None if diagnosis.picked is None else str(diagnosis.picked),
    )
    console.print()
    console.print(_plugins(diagnosis))
    console.print()
    console.print(_backends(diagnosis))
    for plugin in diagnosis.plugins:
        for failure in plugin.failures:
            if failure.traceback:
                console.print()
                console.print(Text(str(failure), style="bold"))
                console.print(Text(failure.traceback.rstrip(), style="dim"), soft_wrap=True)
    console.print()
    for note in diagnosis.notes:
        console.print(Text(f"note: {note}"), soft_wrap=True)
    for problem in diagnosis.problems:
        console.print(Text(f"problem: {problem}", style="red"), soft_wrap=True)
    if not diagnosis.problems:
        console.print(Text("no problems", style="green"))


def _plugins(diagnosis: Diagnosis) -> Table:
    table = plain_table("plugin", "from", "state", "devices", "backends")
    for plugin in diagnosis.plugins:
        table.add_row(
            plugin.plugin,
            f"{plugin.distribution} {plugin.version}".strip(),
            _state(plugin),
            ", ".join(f"{found.vendor}:{found.arch}" for found in plugin.platforms),
            str(len(plugin.backends) or ""),
            style="red" if plugin.failures else None,
        )
    return table


def _state(plugin: Examined) -> str:
    errors = "; ".join(failure.error for failure in plugin.failures)
    return f"{plugin.status}: {errors}" if errors else plugin.status


def _backends(diagnosis: Diagnosis) -> Table:
    table = plain_table("backend", "here", "libraries")
    present = {platform.vendor for platform in diagnosis.detection.platforms}
    for plugin in diagnosis.plugins:
        for backend in plugin.backends:
            here = _here(backend, present)
            # Nobody is told to install what would not make the backend run
            mendable = here in ("ready", HERE["LIBRARY"])
            libraries = "\n".join(_libraries(backend)) if mendable else ""
            table.add_row(backend["address"], here, libraries)
    return table


def _here(backend: Mapping[str, Any], present: Set[str]) -> str:
    if backend["vendors"] and present.isdisjoint(backend["vendors"]):
        return "other hardware"
    reasons = backend["reasons"]
    return HERE.get(reasons[0]["code"], "no") if reasons else "ready"


def _libraries(backend: Mapping[str, Any]) -> Iterator[str]:
    """What is there in few words; what is not with its line to type, on a line of its own."""
    for library in backend["libraries"]:
        if library["state"] == "present":
            yield library["installed"]
            continue
        found = f" ({library['installed']})" if library["installed"] else ""
        yield f"{library['wanted']}: {library['state']}{found}"
        if library["hint"]:
            yield f"  {library['hint']}"
