"""What is on this machine: every plugin's probe, isolated and in bounded time; what none found."""

from __future__ import annotations

import queue
import threading
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from attnmux.core.choosing.cpu import probe_cpu
from attnmux.core.choosing.libraries import installed_version
from attnmux.core.choosing.platform import VENDORS, Platform, Vendor
from attnmux.core.choosing.plugins import Plugin, PluginFailure, Plugins
from attnmux.core.errors import AmbiguousPlatform, InvalidInput

PROBE_SECONDS = 5.0
"""For one probe. A healthy one answers in milliseconds; a wedged driver never does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnservedDevice:
    """A device that is present and that no plugin reported."""

    vendor: str
    evidence: str
    """The device node, or the bus address."""
    distribution: str
    problem: str
    fix: str

    def __str__(self) -> str:
        return (
            f"a device of {self.vendor} is present ({self.evidence}) but {self.problem}: {self.fix}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Detection:
    """The platforms of this machine; the CPU is always there and comes last."""

    platforms: tuple[Platform, ...]
    failures: tuple[PluginFailure, ...] = ()
    """Plugins and probes that did not work."""
    unserved: tuple[UnservedDevice, ...] = ()

    @property
    def accelerators(self) -> tuple[Platform, ...]:
        return tuple(found for found in self.platforms if found.vendor != "cpu")


def detect(
    plugins: Plugins, *, seconds: float = PROBE_SECONDS, root: Path = Path("/")
) -> Detection:
    """Ask every plugin for its devices, and look for those that none found.

    A probe that raises, exits, or gives no answer in `seconds` is a failure in the result. `root`
    is where /dev and /sys are.
    """
    found = _ask_all(plugins, seconds)
    loaded = {plugin.distribution for plugin in plugins.loaded}
    return survey(found, loaded=loaded, failures=plugins.failures, root=root)


def survey(
    found: Iterable[Platform],
    *,
    loaded: Collection[str],
    failures: Sequence[PluginFailure],
    root: Path = Path("/"),
) -> Detection:
    """What the probes `found`, the CPU, and the devices in `root` that nobody found.

    `loaded`: the distributions of the plugins that work; `failures`: of those that do not.
    """
    platforms = sorted(found, key=lambda platform: (platform.vendor, platform.arch, platform.name))
    served = {platform.vendor for platform in platforms}
    unserved = [
        _diagnosis(vendor, evidence, loaded, failures)
        for vendor in VENDORS.values()
        if vendor.name not in served and (evidence := _evidence(vendor, root))
    ]
    return Detection(
        platforms=(*platforms, *(() if "cpu" in served else (probe_cpu(),))),
        failures=tuple(failures),
        unserved=tuple(unserved),
    )


def _ask_all(plugins: Plugins, seconds: float) -> list[Platform]:
    """What the probes found, in the order of the plugins. Failures are recorded in `plugins`."""
    asked = [plugin for plugin in plugins.loaded if plugins.probes(plugin)]
    found: list[Platform] = []
    while asked:
        answers: Answers = queue.SimpleQueue()
        # A daemon thread can be abandoned: nothing stops one that hangs in a driver. One thread
        # serves all probes until one hangs, as starting a thread costs more than most probes
        worker = threading.Thread(target=_work, args=(plugins, asked, answers), daemon=True)
        worker.start()
        for place, plugin in enumerate(asked):
            try:
                platforms, error = answers.get(timeout=seconds)
            except queue.Empty:
                plugins.record(plugin, TimeoutError(f"no answer in {seconds:g} s"))
                asked = asked[place + 1 :]
                break
            found += platforms
            if error is not None:
                plugins.record(plugin, error)
        else:
            break
    return found


Answers = queue.SimpleQueue[tuple[Sequence[Platform], BaseException | None]]


def _work(plugins: Plugins, asked: Sequence[Plugin], answers: Answers) -> None:
    for plugin in asked:
        try:
            answers.put((plugins.platforms_of(plugin), None))
        except BaseException as error:
            answers.put(((), error))


def _evidence(vendor: Vendor, root: Path) -> str:
    """The first device node or bus address that proves a device of the vendor."""
    for pattern in vendor.nodes:
        for node in sorted(root.glob(pattern.lstrip("/"))):
            return f"/{node.relative_to(root)}"
    if vendor.pci_vendor:
        for node in sorted(root.glob("sys/class/drm/renderD*/device")):
            address = node.resolve().name
            # Function 02.0 of bus 0 is the graphics of the CPU's own package: no reason to warn
            if not address.endswith("00:02.0") and _read(node / "vendor") == vendor.pci_vendor:
                return f"PCI {address}"
    return ""


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _diagnosis(
    vendor: Vendor, evidence: str, loaded: Collection[str], failures: Sequence[PluginFailure]
) -> UnservedDevice:
    broken = [row for row in failures if row.distribution == vendor.distribution]
    if broken:
        problem = f"{vendor.distribution} is broken ({broken[0].error})"
        fix = f"pip install --force-reinstall {vendor.distribution}, or repair the driver"
    elif vendor.distribution in loaded:
        problem = f"{vendor.distribution} found none"
        fix = "check the driver, or whether that version can find devices yet"
    elif installed_version(vendor.distribution) is not None:
        problem = f"{vendor.distribution} is left out"
        fix = "admit it (allow_plugins, deny_plugins, no_plugins)"
    else:
        problem = f"{vendor.distribution} is not installed"
        fix = f"pip install {vendor.distribution}"
    return UnservedDevice(
        vendor=vendor.name,
        evidence=evidence,
        distribution=vendor.distribution,
        problem=problem,
        fix=fix,
    )


def pick_platform(detection: Detection, wanted: str | None = None) -> Platform:
    """The platform to use: the accelerator where there is exactly one kind, else the CPU.

    `wanted` is a vendor, or `vendor:arch`, of a platform that was found. Raises AmbiguousPlatform
    where several kinds of accelerator are present (or match), InvalidInput where none matches. A
    caller that gets the CPU should say `detection.unserved` and `detection.failures` loudly.
    """
    if wanted is None:
        return _only(detection.accelerators or detection.platforms[-1:])
    wanted = wanted.strip().lower()
    matching = tuple(p for p in detection.platforms if wanted in (p.vendor, f"{p.vendor}:{p.arch}"))
    if matching:
        return _only(matching)
    present = ", ".join(f"{found.vendor}:{found.arch}" for found in detection.platforms)
    notes = "".join(f"; {device}" for device in detection.unserved if device.vendor == wanted)
    raise InvalidInput("platform", came=repr(wanted), expected=f"one of {present}{notes}")


def _only(found: Sequence[Platform]) -> Platform:
    kinds = sorted({f"{platform.vendor}:{platform.arch}" for platform in found})
    if len(kinds) > 1:
        raise AmbiguousPlatform(
            f"several kinds of accelerator are present: {' and '.join(kinds)}; "
            "name one (--platform VENDOR, ATTNMUX_PLATFORM, or platform in attnmux.toml)"
        )
    return found[0]
