"""What is on this machine: every plugin's probe, isolated and in bounded time; what none found."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from attnmux.core.choosing.cpu import probe_cpu
from attnmux.core.choosing.platform import VENDORS, Platform, Vendor
from attnmux.core.choosing.plugins import Plugin, PluginFailure, Plugins
from attnmux.core.errors import AmbiguousPlatform, InvalidInput

PROBE_SECONDS = 5.0
"""For all probes together. A healthy one answers in milliseconds; a wedged driver never does."""


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
    """Ask every plugin for its devices, at once, within `seconds`; look for what they missed.

    A probe that raises, exits or hangs is a failure in the result. `root` is where /dev and /sys
    are.
    """
    found = [platform for group in _ask_all(plugins, seconds) for platform in group]
    served = {platform.vendor for platform in found}
    unserved = [
        _diagnosis(vendor, evidence, plugins)
        for vendor in VENDORS.values()
        if vendor.name not in served and (evidence := _evidence(vendor, root))
    ]
    found.sort(key=lambda platform: (platform.vendor, platform.arch, platform.name))
    return Detection(
        platforms=(*found, *(() if "cpu" in served else (probe_cpu(),))),
        failures=plugins.failures,
        unserved=tuple(unserved),
    )


def _ask_all(plugins: Plugins, seconds: float) -> list[Sequence[Platform]]:
    """The answers that came in time, in the order of the plugins."""
    answers: queue.SimpleQueue[tuple[Plugin, Sequence[Platform], BaseException | None]]
    answers = queue.SimpleQueue()

    def ask(plugin: Plugin) -> None:
        try:
            answers.put((plugin, plugins.platforms_of(plugin), None))
        except (Exception, SystemExit) as error:
            answers.put((plugin, (), error))

    waiting = {plugin.name: plugin for plugin in plugins.loaded if plugins.probes(plugin)}
    for plugin in waiting.values():
        # A daemon thread can be abandoned: nothing stops one that hangs in a driver
        threading.Thread(target=ask, args=(plugin,), daemon=True).start()
    got: dict[str, Sequence[Platform]] = {}
    end = time.monotonic() + seconds
    while waiting:
        try:
            plugin, platforms, error = answers.get(timeout=max(0.0, end - time.monotonic()))
        except queue.Empty:
            break
        del waiting[plugin.name]
        got[plugin.name] = platforms
        if error is not None:
            plugins.record(plugin, error)
    for plugin in waiting.values():
        plugins.record(plugin, TimeoutError(f"the probe gave no answer in {seconds:g} s"))
    return [got[name] for name in sorted(got)]


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


def _diagnosis(vendor: Vendor, evidence: str, plugins: Plugins) -> UnservedDevice:
    broken = [row for row in plugins.failures if row.distribution == vendor.distribution]
    loaded = any(plugin.distribution == vendor.distribution for plugin in plugins.loaded)
    if broken:
        problem = f"{vendor.distribution} is broken ({broken[0].error})"
        fix = f"pip install --force-reinstall {vendor.distribution}, or repair the driver"
    elif loaded:
        problem = f"{vendor.distribution} found none"
        fix = "check the driver, or whether that version can find devices yet"
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
            "name one (ATTNMUX_PLATFORM, or platform in attnmux.toml)"
        )
    return found[0]
