"""`attnmux doctor`: what is on this machine, which plugins work, and what to do about the rest."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import click

from attnmux.core.choosing.find.devices import Detection, pick_platform, survey
from attnmux.core.choosing.find.plugins import PluginFailure, find_entries
from attnmux.core.choosing.machine.platform import Platform
from attnmux.core.choosing.machine.vendors import VENDORS
from attnmux.core.choosing.offer.libraries import installed_version
from attnmux.core.cli.doctor_examining import Examined, examine
from attnmux.core.cli.run import Run, common_options, echo_json, pass_run
from attnmux.core.errors import AmbiguousPlatform, InvalidInput

SECONDS, LONGEST = 15, 3600
"""For one plugin; a healthy one answers in less than one."""
PROBLEMS = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """What was found; `problems` are what keeps something from working, each with its remedy."""

    detection: Detection
    plugins: tuple[Examined, ...]
    picked: Platform | None
    problems: tuple[str, ...]
    notes: tuple[str, ...]


@click.command()
@click.option(
    "--timeout",
    "seconds",
    type=click.IntRange(1, LONGEST),
    default=SECONDS,
    show_default=True,
    help="Seconds that one plugin may take.",
)
@common_options
@pass_run
def doctor(run: Run, seconds: int, as_json: bool) -> int:
    """Say what is on this machine, which plugins work, and what is broken or missing.

    Each plugin is loaded in a process of its own. Exits with 0 when all is well, 1 when something
    is broken, missing or undecided.
    """
    settings = run.settings()
    entries, unreadable = find_entries(*settings.plugin_filter())
    plugins = (
        *(_unread(failure) for failure in unreadable),
        *examine(entries, settings, seconds),
    )
    diagnosis = diagnose(plugins, settings.platform)
    if as_json:
        echo_json(_as_json(diagnosis))
    else:
        from attnmux.core.cli.doctor_report import report  # noqa: PLC0415  # rich, off the JSON path

        report(diagnosis)
    return PROBLEMS if diagnosis.problems else 0


def _unread(failure: PluginFailure) -> Examined:
    return Examined(
        plugin=failure.plugin,
        distribution=failure.distribution,
        version=failure.version,
        failures=(failure,),
    )


def diagnose(plugins: Sequence[Examined], wanted: str | None) -> Diagnosis:
    """The machine as the plugins see it, and what is wrong. `wanted`: the platform configured."""
    failures = [failure for plugin in plugins for failure in plugin.failures]
    detection = survey(
        (platform for plugin in plugins for platform in plugin.platforms),
        loaded={plugin.distribution for plugin in plugins if not plugin.failures},
        failures=failures,
    )
    problems = [*map(str, detection.failures), *_strangers(plugins), *map(str, detection.unserved)]
    if not plugins:
        problems.append(
            "no plugin is installed, or the configuration admits none: pip install attnmux-cpu"
        )
    picked = None
    try:
        picked = pick_platform(detection, wanted)
    except (AmbiguousPlatform, InvalidInput) as error:
        problems.append(str(error))
    else:
        problems += _nothing_runs(plugins, picked)
    return Diagnosis(
        detection=detection,
        plugins=tuple(plugins),
        picked=picked,
        problems=tuple(problems),
        notes=tuple(_namesakes(plugins)),
    )


def _strangers(plugins: Sequence[Examined]) -> Iterator[str]:
    """Cards that are written for another version of the contract."""
    for plugin in plugins:
        for backend in plugin.backends:
            for reason in backend["reasons"]:
                if reason["code"] == "CONTRACT":
                    yield (
                        f"{backend['address']} ({plugin.distribution} {plugin.version}) is written "
                        f"for contract {reason['offered']}, and this attnmux-core has "
                        f"{reason['wanted']}: pip install --upgrade attnmux-core "
                        f"{plugin.distribution}"
                    )


def _nothing_runs(plugins: Sequence[Examined], picked: Platform) -> Iterator[str]:
    """Where no backend for the machine is ready: the lines that would make one run."""
    meant = [
        backend
        for plugin in plugins
        for backend in plugin.backends
        if picked.vendor in (backend["vendors"] or [picked.vendor])
    ]
    if not plugins or not all(backend["reasons"] for backend in meant):
        return
    lines = [
        library["hint"]
        for backend in meant
        if {reason["code"] for reason in backend["reasons"]} == {"LIBRARY"}
        for library in backend["libraries"]
        if library["hint"]
    ]
    portable = VENDORS["cpu"].distribution
    if portable not in {plugin.distribution for plugin in plugins}:
        lines.append(f"pip install {portable}")
    where = picked.name or str(picked)
    fix = f": {', or '.join(dict.fromkeys(lines))}" if lines else ""
    yield f"no backend runs on {where}, as installed and configured{fix}"


def _namesakes(plugins: Sequence[Examined]) -> Iterator[str]:
    addresses: dict[str, list[str]] = {}
    for plugin in plugins:
        for backend in plugin.backends:
            addresses.setdefault(backend["name"], []).append(backend["address"])
    for name, sharing in addresses.items():
        if len(sharing) > 1:
            yield f"{name} is the name of several backends: say {' or '.join(sorted(sharing))}"


def _as_json(diagnosis: Diagnosis) -> dict[str, Any]:
    return {
        "python": sys.version.split()[0],
        "core": installed_version("attnmux-core"),
        "torch": installed_version("torch"),
        "platforms": [platform.to_dict() for platform in diagnosis.detection.platforms],
        "picked": None if diagnosis.picked is None else str(diagnosis.picked),
        "plugins": [
            {
                "plugin": plugin.plugin,
                "distribution": plugin.distribution,
                "version": plugin.version,
                "status": plugin.status,
                "platforms": [str(platform) for platform in plugin.platforms],
                "backends": list(plugin.backends),
                "failures": [asdict(failure) for failure in plugin.failures],
            }
            for plugin in diagnosis.plugins
        ],
        "unserved": [asdict(device) for device in diagnosis.detection.unserved],
        "problems": list(diagnosis.problems),
        "notes": list(diagnosis.notes),
    }
