"""The devices of this machine: those that plugins' probes find in bounded time, and the others."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from attnmux.core.choosing.find.plugins import PluginFailure, Plugins, failure_of
from attnmux.core.choosing.machine.cpu import bare_cpu, probe_cpu
from attnmux.core.choosing.machine.platform import Platform
from attnmux.core.choosing.machine.vendors import VENDORS, Vendor
from attnmux.core.choosing.offer.libraries import installed_version
from attnmux.core.errors import AmbiguousPlatform, InvalidInput

CORE = "attnmux-core"
PROBE_SECONDS = 5.0
"""For one probe. A healthy one answers in milliseconds, a wedged driver never."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnservedDevice:
    """A device that is present but that no plugin reports."""

    vendor: str
    evidence: str
    """The path that proves it, or the bus address."""
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
    """Plugins and probes that did not work, including core's own."""
    unserved: tuple[UnservedDevice, ...] = ()

    @property
    def accelerators(self) -> tuple[Platform, ...]:
        return tuple(found for found in self.platforms if found.vendor != "cpu")


def detect(
    plugins: Plugins, *, seconds: float = PROBE_SECONDS, root: Path = Path("/")
) -> Detection:
    """Ask every plugin for its devices, and look for devices that no plugin reports.

    A probe that raises, exits, or gives no answer within `seconds` is a failure in the result.
    `root` contains /dev and /sys.
    """
    asked = [plugin for plugin in plugins.loaded if plugins.probes(plugin)]
    found: list[Platform] = []
    answers = ask_each([partial(plugins.platforms_of, plugin) for plugin in asked], seconds)
    for plugin, (platforms, error) in zip(asked, answers, strict=True):
        found += platforms
        if error is not None:
            plugins.record(plugin, error)
    loaded = {plugin.distribution for plugin in plugins.loaded}
    return survey(found, loaded=loaded, failures=plugins.failures, seconds=seconds, root=root)


def survey(
    found: Iterable[Platform],
    *,
    loaded: Collection[str],
    failures: Sequence[PluginFailure],
    seconds: float = PROBE_SECONDS,
    root: Path = Path("/"),
) -> Detection:
    """The devices that the probes `found`, the CPU, and the devices in `root` that no probe found.

    `loaded`: the distributions of the plugins that work; `failures`: of those that do not. A CPU or
    a `root` that gives no answer within `seconds` is another failure.
    """
    platforms = sorted(found, key=_order)
    served = {platform.vendor for platform in platforms}
    own = list(failures)
    if "cpu" not in served:
        ((cpu, error),) = ask_each([lambda: (probe_cpu(),)], seconds)
        platforms += cpu or (bare_cpu(),)
        own += _own_failure("the CPU", error)
    ((present, error),) = ask_each([partial(_present, served, root)], seconds)
    own += _own_failure("/dev and /sys", error)
    return Detection(
        platforms=tuple(platforms),
        failures=tuple(own),
        unserved=tuple(
            _diagnosis(vendor, evidence, loaded, failures) for vendor, evidence in present
        ),
    )


def _order(platform: Platform) -> tuple[bool, str, str, str]:
    return platform.vendor == "cpu", platform.vendor, platform.arch, platform.name


def _present(served: Collection[str], root: Path) -> list[tuple[Vendor, str]]:
    """Vendors that are not served, with the proof that a device of theirs is present."""
    return [
        (vendor, evidence)
        for vendor in VENDORS.values()
        if vendor.name not in served and (evidence := vendor.evidence(root))
    ]


def _own_failure(asked: str, error: BaseException | None) -> list[PluginFailure]:
    if error is None:
        return []
    return [failure_of(f"core, asking {asked}", CORE, "", "platforms", error)]


def _diagnosis(
    vendor: Vendor, evidence: str, loaded: Collection[str], failures: Sequence[PluginFailure]
) -> UnservedDevice:
    broken = [row for row in failures if row.distribution == vendor.distribution]
    if broken:
        problem = f"{vendor.distribution} is broken ({broken[0].error})"
        if broken[0].stage == "platforms":
            fix = "mend the driver, its library or the container, whichever the error names"
        else:
            fix = f"pip install --force-reinstall {vendor.distribution}"
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
    """The platform to use: the only kind of accelerator, or the CPU where there is none.

    `wanted` is the vendor, or `vendor:arch`, of a platform that was found, in any case. Raises
    AmbiguousPlatform where several kinds of accelerator are present (or match), InvalidInput where
    none matches. A caller that gets the CPU should show `detection.unserved` and
    `detection.failures` prominently.
    """
    if wanted is None:
        return _only(detection.accelerators or detection.platforms[-1:])
    name = wanted.strip().lower()
    matching = tuple(
        found
        for found in detection.platforms
        if name in (found.vendor.lower(), f"{found.vendor}:{found.arch}".lower())
    )
    if matching:
        return _only(matching)
    vendor = name.partition(":")[0]
    present = ", ".join(f"{found.vendor}:{found.arch}" for found in detection.platforms)
    notes = "".join(f"; {device}" for device in detection.unserved if device.vendor == vendor)
    raise InvalidInput("platform", got=repr(wanted), expected=f"one of {present}{notes}")


def _only(found: Sequence[Platform]) -> Platform:
    kinds = sorted({f"{platform.vendor}:{platform.arch}" for platform in found})
    if len(kinds) > 1:
        raise AmbiguousPlatform(
            f"several kinds of accelerator are present: {' and '.join(kinds)}; "
            "name one (--platform VENDOR; VENDOR or VENDOR:ARCH in ATTNMUX_PLATFORM or as platform "
            "in attnmux.toml)"
        )
    return found[0]


T = TypeVar("T")
Answer = tuple[Sequence[T], "BaseException | None"]
"""The findings, or nothing and the reason."""


def ask_each(questions: Sequence[Callable[[], Sequence[T]]], seconds: float) -> list[Answer[T]]:
    """The answer to each question: what it returned, or nothing and the exception.

    A question without an answer within `seconds` is abandoned with a TimeoutError; the others
    continue.
    """
    answers: list[Answer[T]] = []
    while len(answers) < len(questions):
        answers += _ask_until_one_hangs(questions[len(answers) :], seconds)
    return answers


def _ask_until_one_hangs(
    questions: Sequence[Callable[[], Sequence[T]]], seconds: float
) -> list[Answer[T]]:
    """At least one answer. All share a thread, as starting one costs more than most probes."""
    told: queue.SimpleQueue[Answer[T]] = queue.SimpleQueue()
    abandoned = threading.Event()
    # A daemon thread can be abandoned: nothing stops one that hangs in a driver
    worker = threading.Thread(target=_work, args=(questions, told, abandoned), daemon=True)
    worker.start()
    answers: list[Answer[T]] = []
    for _ in questions:
        try:
            answers.append(told.get(timeout=seconds))
        except queue.Empty:
            abandoned.set()
            return [*answers, ((), TimeoutError(f"no answer in {seconds:g} s"))]
    return answers


def _work(
    questions: Sequence[Callable[[], Sequence[T]]],
    told: queue.SimpleQueue[Answer[T]],
    abandoned: threading.Event,
) -> None:
    for question in questions:
        if abandoned.is_set():
            return
        try:
            told.put((question(), None))
        except BaseException as error:
            told.put(((), error))
