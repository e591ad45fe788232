"""The problems of this machine, from the answers of its plugins."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution
from pathlib import Path

from attnmux.core.cards.card import BackendCard, Offer
from attnmux.core.cards.named import read_options
from attnmux.core.choosing.problem import groups_of
from attnmux.core.choosing.requirements import caveats
from attnmux.core.cli.here import READY, Backend, backends_here, lacking_compiler, serving_builds
from attnmux.core.facts.errors import AmbiguousPlatform, InvalidInput, UnknownBackend
from attnmux.core.facts.libraries import (
    canonical,
    distributions,
    identity,
    installed_version,
    release,
)
from attnmux.core.facts.platform import Platform
from attnmux.core.facts.policy import Policy
from attnmux.core.facts.request import Request
from attnmux.core.facts.values import PHASES
from attnmux.core.facts.vendors import VENDORS
from attnmux.core.find.devices import Detection, survey
from attnmux.core.find.plugin import Plugin
from attnmux.core.find.plugins import Plugins
from attnmux.core.find.settings import Settings
from attnmux.core.measured.shipped import read_once


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """The findings. `problems` keep something from working; each names its remedy."""

    detection: Detection
    plugins: tuple[Plugin, ...]
    backends: tuple[Backend, ...]
    picked: Platform | None
    problems: tuple[str, ...]
    notes: tuple[str, ...]


def diagnose(plugins: Sequence[Plugin], settings: Settings) -> Diagnosis:
    """The machine as the plugins see it, and the problems.

    settings: the configured backends and platform.
    """
    policy = settings.policy()
    detection = survey(
        (platform for plugin in plugins for platform in plugin.platforms),
        loaded={plugin.distribution for plugin in plugins if not plugin.failures},
        failures=[failure for plugin in plugins for failure in plugin.failures],
        variables=Settings.device_variables(),
        named=settings.platform,
    )
    offers = Plugins(tuple(plugins)).offers()
    backends = backends_here(offers, policy, detection.platforms)
    problems = [
        *_broken(plugins, detection),
        *_other_contracts(backends),
        *_misnamed(policy, offers),
        *map(str, detection.unserved),
        *overlapping(offer.card for offer in offers),
        *unreadable(plugins),
    ]
    if not plugins:
        problems.append(
            "no plugin is installed, or the configuration admits none: pip install attnmux-cpu"
        )
    picked = None
    notes = list(_ambiguous_names(backends))
    try:
        picked = detection.pick(settings.platform, named=settings.where("platform"))
    except (AmbiguousPlatform, InvalidInput) as error:
        problems.append(str(error))
    else:
        problems += _without_backend(plugins, backends, picked)
        cards = [card for plugin in plugins for card in plugin.cards]
        notes += [*serving_builds(cards, picked), *lacking_compiler(cards, picked)]
        ready = [backend.offer.card for backend in backends if backend.here == READY]
        notes += [note for card in ready for note in caveats(card, picked, installed_version)]
        notes += uncounted(plugins, backends, picked)
    return Diagnosis(
        detection=detection,
        plugins=tuple(plugins),
        backends=backends,
        picked=picked,
        problems=tuple(problems),
        notes=tuple(notes),
    )


def _broken(plugins: Sequence[Plugin], detection: Detection) -> Iterator[str]:
    """The failures, and plugins that import torch, each with the setting that leaves it out."""
    names = {plugin.name for plugin in plugins}
    for failure in detection.failures:
        left_out = f"; {_leaving_out(failure.plugin)}" if failure.plugin in names else ""
        yield f"{failure}{left_out}"
    for plugin in plugins:
        if plugin.imports_torch:
            yield (
                f"plugin {plugin.name} ({plugin.distribution} {plugin.version}) imports torch, "
                f"{plugin.seconds:.1f} s at each start; {_leaving_out(plugin.name)}"
            )


def _leaving_out(name: str) -> str:
    return f'deny_plugins = ["{name}"] in attnmux.toml leaves it out (ATTNMUX_DENY_PLUGINS={name})'


def _other_contracts(backends: Sequence[Backend]) -> Iterator[str]:
    """Cards written for another version of the contract."""
    for offer, reasons in ((backend.offer, backend.reasons) for backend in backends):
        for reason in reasons:
            if reason.code == "CONTRACT":
                yield (
                    f"{offer.address} ({offer.distribution} {offer.version}) is written for "
                    f"contract {reason.offered}, and this attnmux-core has {reason.wanted}: "
                    f"pip install --upgrade attnmux-core {offer.distribution}"
                )


def _misnamed(policy: Policy, offers: Sequence[Offer]) -> Iterator[str]:
    """The first backend or option of the configuration that no plugin has: every decision would be
    refused."""
    try:
        groups_of(Request(phases=PHASES), policy, offers, installed_version)
        read_options(policy.options, offers)
    except (InvalidInput, UnknownBackend) as error:
        yield str(error)


def _without_backend(
    plugins: Sequence[Plugin], backends: Sequence[Backend], picked: Platform
) -> Iterator[str]:
    """If no backend for this machine is ready: the commands that would make one run."""
    candidates = [backend for backend in backends if backend.fits(picked)]
    if not plugins or not all(candidate.reasons for candidate in candidates):
        return
    lines = [
        library.hint
        for candidate in candidates
        if {reason.code for reason in candidate.reasons} == {"LIBRARY"}
        for library in candidate.libraries
        if library.hint
    ]
    portable = VENDORS["cpu"].distribution
    if portable not in {plugin.distribution for plugin in plugins}:
        lines.append(f"pip install {portable}")
    where = picked.name or str(picked)
    fix = f": {', or '.join(dict.fromkeys(lines))}" if lines else ""
    yield f"no backend runs on {where}, as installed and configured{fix}"


def _ambiguous_names(backends: Sequence[Backend]) -> Iterator[str]:
    addresses: dict[str, list[str]] = {}
    for backend in backends:
        addresses.setdefault(backend.offer.card.name, []).append(backend.offer.address)
    for name, sharing in addresses.items():
        if len(sharing) > 1:
            yield f"{name} is the name of several backends: say {' or '.join(sorted(sharing))}"


INIT = "/__init__.py"


def overlapping(cards: Iterable[BackendCard]) -> Iterator[str]:
    """A line for each package that a library of the cards shares with another distribution."""
    libraries = {canonical(name) for card in cards for name in card.libraries()}
    owners: dict[str, dict[str, str]] = {}
    installed = distributions()
    for name, distribution in installed.items():
        for package, digest in _packages(distribution):
            owners.setdefault(package, {})[name] = digest
    for package, digests in sorted(owners.items()):
        # Namespaces that several distributions fill have one content.
        if len(set(digests.values())) < 2 or libraries.isdisjoint(digests):
            continue
        names = sorted(digests)
        versions = [release(name, identity(installed[name])[1]) for name in names]
        yield (
            f"{' and '.join(versions)} own one package, {package}, and overwrite each other's "
            f"files: pip uninstall {' '.join(names)}, then pip install the one that you need"
        )


def _packages(distribution: Distribution) -> Iterator[tuple[str, str]]:
    """Top-level packages, and the hash of each one's first file."""
    try:
        record = distribution.read_text("RECORD") or ""
    except (OSError, ValueError):
        return
    for line in record.splitlines():
        path, _, rest = line.partition(",")
        package, init, _ = path.partition(INIT)
        if init and path.endswith(INIT) and "/" not in package:
            yield package, rest.partition(",")[0]


def unreadable(plugins: Sequence[Plugin]) -> Iterator[str]:
    """A line for each file that choices leave out."""
    for plugin in plugins:
        for each in plugin.figures:
            try:
                read_once(each.file)
            except InvalidInput as error:
                yield (
                    f"figures of {plugin.release} are left out: {error}: "
                    f"pip install --upgrade {plugin.distribution}"
                )


def uncounted(
    plugins: Sequence[Plugin], backends: Sequence[Backend], platform: Platform
) -> Iterator[str]:
    """A line for each file of such a device with figures that do not hold here.

    A backend that cannot run here has a reason of its own in the report.
    """
    offers = {each.offer.address: each.offer for each in backends}
    idle = {each.offer.address for each in backends if each.here != READY}
    for plugin in plugins:
        for each in plugin.figures:
            if not each.hold_on(platform):
                continue
            try:
                sources = read_once(each.file).sources
            except InvalidInput:  # a line of `unreadable`
                continue
            reasons = {
                source.backend: source.shortfall(platform, offers, installed_version)
                for source in sources
                if source.backend not in idle
            }
            if lacking := [f"{address} ({why})" for address, why in reasons.items() if why]:
                yield (
                    f"{Path(each.file).name} of {plugin.release} does not count for "
                    f"{'; '.join(lacking)}: pip install --upgrade {plugin.distribution}, or "
                    "measure here by attnmux bench --keep"
                )
