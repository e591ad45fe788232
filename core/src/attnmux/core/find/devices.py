"""The devices of this machine: those that plugins' probes find in bounded time, and the others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import TypeVar

from attnmux.core.facts.errors import AmbiguousPlatform, InvalidInput
from attnmux.core.facts.platform import Platform
from attnmux.core.find.cpu import bare_cpu, probe_cpu
from attnmux.core.find.plugin import Plugin, PluginFailure, failure_of
from attnmux.core.find.unserved import (
    UnservedDevice,
    diagnosis,
    named_device,
    present_vendors,
)

CORE = "attnmux-core"
OWN_SECONDS = 5.0
"""For each of core's own two questions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Detection:
    """The platforms of this machine; the CPU is always there and comes last."""

    platforms: tuple[Platform, ...]
    failures: tuple[PluginFailure, ...] = ()
    """Plugins and probes that did not work, including core's own."""
    unserved: tuple[UnservedDevice, ...] = ()

    @property
    def accelerators(self) -> tuple[Platform, ...]:
        return tuple(platform for platform in self.platforms if platform.vendor != "cpu")

    def pick(self, wanted: str | None = None, *, named: str = "platform") -> Platform:
        """The platform to use: the only kind of accelerator, or the CPU if there is none.

        `wanted` is the vendor, or `vendor:arch`, of a platform that was found, in any case; `named`
        is its source, for the error. Unlike cards of one architecture are one platform, with both
        names and the smaller memory. Raises AmbiguousPlatform if several kinds of accelerator are
        present (or match), InvalidInput if none matches. A caller that gets the CPU should show
        `unserved` and `failures` prominently.
        """
        if wanted is None:
            return _only(self.accelerators or self.platforms[-1:])
        check_named(self, wanted, named=named)
        return _only(named_platforms(self.platforms, wanted))


def survey(
    found: Iterable[Platform],
    *,
    loaded: Collection[str],
    failures: Sequence[PluginFailure],
    variables: Mapping[str, str] = {},
    named: str | None = None,
    seconds: float = OWN_SECONDS,
    root: Path = Path("/"),
) -> Detection:
    """The devices that the probes `found`, the CPU, and the devices in `root` that no probe found.

    `loaded`: the distributions of the plugins that work; `failures`: of those that do not;
    `variables`: those of the environment that hide devices; `named`: the configured platform, which
    may describe a device that is present and that no probe finds. A CPU or a `root` that gives no
    answer within `seconds` is another failure.
    """
    platforms = sorted(found, key=_order)
    served = {platform.vendor for platform in platforms}
    all_failures = list(failures)
    if "cpu" not in served:
        cpu, error = _in_time(probe_cpu, seconds)
        platforms.append(cpu or bare_cpu())
        all_failures += _own_failure("the CPU", error)
    present, error = _in_time(lambda: present_vendors(served, variables, root), seconds)
    all_failures += _own_failure("/dev and /sys", error)
    unserved = tuple(
        diagnosis(vendor, evidence, loaded, failures, variables)
        for vendor, evidence in present or ()
    )
    described = named_device(named, unserved)
    if described is not None:
        platforms = sorted([*platforms, described], key=_order)
        unserved = tuple(device for device in unserved if device.vendor != described.vendor)
    return Detection(platforms=tuple(platforms), failures=tuple(all_failures), unserved=unserved)


def _order(platform: Platform) -> tuple[bool, str, str, str]:
    return platform.vendor == "cpu", platform.vendor, platform.arch, platform.name


def _own_failure(asked: str, error: BaseException | None) -> list[PluginFailure]:
    if error is None:
        return []
    core = Plugin(EntryPoint(f"core, asking {asked}", "", ""), CORE)
    return [failure_of(core, "platforms", error)]


def named_platforms(platforms: Iterable[Platform], wanted: str) -> tuple[Platform, ...]:
    """The platforms that `wanted` names: a vendor or vendor:arch, in any case. If it describes
    more, its vendor and its architecture count."""
    name = wanted.strip().lower().partition(",")[0]
    return tuple(
        platform
        for platform in platforms
        if name in (platform.vendor.lower(), f"{platform.vendor}:{platform.arch}".lower())
    )


def check_named(detection: Detection, wanted: str, *, named: str = "platform") -> None:
    """Raise InvalidInput if `wanted` names no platform that was found."""
    if named_platforms(detection.platforms, wanted):
        return
    vendor = wanted.strip().lower().partition(":")[0]
    present = ", ".join(f"{platform.vendor}:{platform.arch}" for platform in detection.platforms)
    notes = "".join(f"; {device}" for device in detection.unserved if device.vendor == vendor)
    raise InvalidInput(named, got=repr(wanted), expected=f"one of {present}{notes}")


def _only(found: Sequence[Platform]) -> Platform:
    kinds = sorted({f"{platform.vendor}:{platform.arch}" for platform in found})
    if len(kinds) > 1:
        raise AmbiguousPlatform(
            f"several kinds of accelerator are present: {' and '.join(kinds)}; "
            "name one (--platform VENDOR; VENDOR or VENDOR:ARCH in ATTNMUX_PLATFORM or as platform "
            "in attnmux.toml)"
        )
    return found[0] if len(found) == 1 else _together(found)


def _together(cards: Sequence[Platform]) -> Platform:
    """Unlike cards of one architecture, with the properties of each."""
    return replace(
        cards[0],
        name=" and ".join(dict.fromkeys(card.name for card in cards if card.name)),
        features=frozenset.intersection(*(card.features for card in cards)),
        count=sum(card.count for card in cards),
        memory_bytes=min(card.memory_bytes for card in cards),
        core_count=min(card.core_count for card in cards),
    )


T = TypeVar("T")


def _in_time(
    question: Callable[[], T], seconds: float
) -> tuple[T, None] | tuple[None, BaseException]:
    """The answer, or nothing and the reason: its exception, or a TimeoutError after `seconds`."""
    result: list[tuple[T, None] | tuple[None, BaseException]] = []

    def work() -> None:
        try:
            result.append((question(), None))
        except BaseException as error:
            result.append((None, error))

    # A daemon thread can be abandoned: nothing stops one that hangs in a driver
    worker = threading.Thread(target=work, daemon=True)
    worker.start()
    worker.join(seconds)
    return result[0] if result else (None, TimeoutError(f"no answer in {seconds:g} s"))
