"""`attnmux doctor`: the devices of this machine, working plugins, and fixes for the rest."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import click
from rich.console import Console
from rich.text import Text

from attnmux.core.cli.doctor_diagnosis import Diagnosis, diagnose
from attnmux.core.cli.here import ELSEWHERE, LACKING, READY, Backend
from attnmux.core.cli.render import render_platforms
from attnmux.core.cli.run import Run, common_options
from attnmux.core.cli.tables import (
    BROKEN,
    plain_console,
    print_elsewhere,
    print_rows,
    proof_cell,
)
from attnmux.core.facts.frozen import plain
from attnmux.core.facts.libraries import installed_version
from attnmux.core.find.manager import manager
from attnmux.core.find.plugin import Plugin
from attnmux.core.find.plugins import find_plugins
from attnmux.core.find.probes import probe

SECONDS, LONGEST = 15, 3600
"""For a plugin to load, and again to answer; a healthy one takes less than one."""
PROBLEMS = 1


@click.command()
@click.option(
    "--timeout",
    "seconds",
    type=click.IntRange(1, LONGEST),
    default=SECONDS,
    show_default=True,
    help="Seconds that one plugin may take to load, and again to answer.",
)
@common_options
def doctor(run: Run, seconds: int, as_json: bool) -> int:
    """List the devices of this machine, the plugins that work, and what is broken or missing.

    Each plugin is loaded in a child process first: one that crashes, hangs or imports torch is
    named. Exits with 0 when all is well, 1 when something is broken, missing or undecided.
    """
    settings = run.settings()
    diagnosis = diagnose(tried(find_plugins(*settings.plugin_filter()), seconds), settings)
    if as_json:
        run.echo_json(_as_json(diagnosis))
    else:
        _report(diagnosis)
    return PROBLEMS if diagnosis.problems else 0


def tried(plugins: Sequence[Plugin], seconds: float) -> list[Plugin]:
    """The plugins with what a child process of each found, and the cards and figures of those that
    it could load."""
    found = []
    for plugin in plugins:
        each = plugin if plugin.failures else probe([plugin], seconds)[0]
        if all(failure.stage == "platforms" for failure in each.failures):
            loaded = manager().load(plugin)
            each = each._replace(cards=loaded.cards, figures=loaded.figures)
        found.append(each)
    return found


def _as_json(diagnosis: Diagnosis) -> dict[str, Any]:
    by_plugin: dict[str, list[dict[str, Any]]] = {}
    for backend in diagnosis.backends:
        by_plugin.setdefault(backend.offer.plugin, []).append(backend.to_dict())
    return {
        "python": sys.version.split()[0],
        "core": installed_version("attnmux-core"),
        "torch": installed_version("torch"),
        "platforms": plain(diagnosis.detection.platforms),
        "picked": None if diagnosis.picked is None else str(diagnosis.picked),
        "plugins": [
            {
                "plugin": plugin.name,
                "distribution": plugin.distribution,
                "version": plugin.version,
                "status": _status(plugin),
                "seconds": round(plugin.seconds, 3),
                "platforms": [str(platform) for platform in plugin.platforms],
                "backends": by_plugin.get(plugin.name, []) if plugin.cards else [],
                "failures": plain(plugin.failures),
            }
            for plugin in diagnosis.plugins
        ],
        "unserved": plain(diagnosis.detection.unserved),
        "problems": list(diagnosis.problems),
        "notes": list(diagnosis.notes),
    }


def _report(diagnosis: Diagnosis) -> None:
    """Versions, devices, plugins, backends with their libraries, tracebacks, problems.

    Tables fit the width. Tracebacks and commands are not wrapped, so that they can be copied.
    """
    console = plain_console()
    core, torch = installed_version("attnmux-core"), installed_version("torch")
    console.print(
        f"attnmux-core {core or 'unknown'}, Python {sys.version.split()[0]}, "
        f"torch {torch or 'not installed'}"
    )
    console.print()
    render_platforms(
        diagnosis.detection.platforms, None if diagnosis.picked is None else str(diagnosis.picked)
    )
    console.print()
    _print_plugins(console, diagnosis)
    console.print()
    _print_backends(console, diagnosis)
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


def _print_plugins(console: Console, diagnosis: Diagnosis) -> None:
    rows = []
    for plugin in diagnosis.plugins:
        errors = "; ".join(failure.error for failure in plugin.failures)
        rows.append(
            (
                plugin.name,
                plugin.release,
                str(len(plugin.cards) or ""),
                f"{plugin.seconds:.2f} s" if plugin.seconds else "",
                ", ".join(f"{platform.vendor}:{platform.arch}" for platform in plugin.platforms),
                ": ".join(filter(None, (_status(plugin), errors))),
            )
        )
    styles = [BROKEN if plugin.failures else "" for plugin in diagnosis.plugins]
    columns = ("plugin", "from", "backends", "loaded in", "devices", "state")
    print_rows(console, columns, rows, styles)


def _status(plugin: Plugin) -> str:
    return "broken" if plugin.failures else "works"


def _print_backends(console: Console, diagnosis: Diagnosis) -> None:
    here = [backend for backend in diagnosis.backends if backend.here != ELSEWHERE]
    rows = []
    for diagnosed in here:
        # Installing a library helps only where nothing else is missing
        lines = "\n".join(_libraries(diagnosed)) if diagnosed.here in (READY, LACKING) else ""
        rows.append((diagnosed.offer.address, proof_cell(diagnosed.proof), diagnosed.here, lines))
    print_rows(console, ("backend", "proof", "here", "libraries"), rows)
    others = [backend.offer.address for backend in diagnosis.backends if backend not in here]
    print_elsewhere(console, others, "attnmux backends --all")


def _libraries(backend: Backend) -> Iterator[str]:
    """Installed libraries, and missing ones with the command that installs them."""
    for library in backend.libraries:
        if library.state == "present":
            yield library.installed
            continue
        version = f" ({library.installed})" if library.installed else ""
        yield f"{library.wanted}: {library.state}{version}"
        if library.hint:
            yield library.hint
