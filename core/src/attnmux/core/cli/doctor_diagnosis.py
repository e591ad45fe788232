"""The problems of this machine, from the answers of its plugins."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from attnmux.core.choosing.find.devices import Detection, pick_platform, survey
from attnmux.core.choosing.machine.platform import Platform
from attnmux.core.choosing.machine.vendors import VENDORS
from attnmux.core.choosing.offer.compiled import lacking_compiler, serving_builds
from attnmux.core.cli.doctor_plugins import Diagnosed
from attnmux.core.errors import AmbiguousPlatform, InvalidInput


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """The findings. `problems` keep something from working; each names its remedy."""

    detection: Detection
    plugins: tuple[Diagnosed, ...]
    picked: Platform | None
    problems: tuple[str, ...]
    notes: tuple[str, ...]


def diagnose(plugins: Sequence[Diagnosed], wanted: str | None) -> Diagnosis:
    """The machine as the plugins see it, and the problems. `wanted` is the configured platform."""
    failures = [failure for plugin in plugins for failure in plugin.failures]
    detection = survey(
        (platform for plugin in plugins for platform in plugin.platforms),
        loaded={plugin.distribution for plugin in plugins if not plugin.failures},
        failures=failures,
    )
    problems = [
        *map(str, detection.failures),
        *_other_contracts(plugins),
        *map(str, detection.unserved),
    ]
    if not plugins:
        problems.append(
            "no plugin is installed, or the configuration admits none: pip install attnmux-cpu"
        )
    picked = None
    notes = list(_ambiguous_names(plugins))
    try:
        picked = pick_platform(detection, wanted)
    except (AmbiguousPlatform, InvalidInput) as error:
        problems.append(str(error))
    else:
        problems += _without_backend(plugins, picked)
        cards = [card for plugin in plugins for card in plugin.cards]
        notes += [*serving_builds(cards, picked), *lacking_compiler(cards, picked)]
    return Diagnosis(
        detection=detection,
        plugins=tuple(plugins),
        picked=picked,
        problems=tuple(problems),
        notes=tuple(notes),
    )


def _other_contracts(plugins: Sequence[Diagnosed]) -> Iterator[str]:
    """Cards written for another version of the contract."""
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


def _without_backend(plugins: Sequence[Diagnosed], picked: Platform) -> Iterator[str]:
    """If no backend for this machine is ready: the commands that would make one run."""
    candidates = [
        backend
        for plugin in plugins
        for backend in plugin.backends
        if picked.vendor in (backend["vendors"] or [picked.vendor])
    ]
    if not plugins or not all(backend["reasons"] for backend in candidates):
        return
    lines = [
        library["hint"]
        for backend in candidates
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


def _ambiguous_names(plugins: Sequence[Diagnosed]) -> Iterator[str]:
    addresses: dict[str, list[str]] = {}
    for plugin in plugins:
        for backend in plugin.backends:
            addresses.setdefault(backend["name"], []).append(backend["address"])
    for name, sharing in addresses.items():
        if len(sharing) > 1:
            yield f"{name} is the name of several backends: say {' or '.join(sorted(sharing))}"
