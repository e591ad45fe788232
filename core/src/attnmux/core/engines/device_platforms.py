"""The platform of a torch device, as torch reports the device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from attnmux.core.facts.errors import InvalidInput
from attnmux.core.facts.platform import Platform
from attnmux.core.facts.vendors import VENDORS, Vendor
from attnmux.core.find.devices import Detection, check_named, named_platforms


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportedDevice:
    """A device, as torch reports it."""

    vendor: Vendor
    arch: str
    version: tuple[int, ...]
    """Numbers of the architecture."""
    name: str
    memory_bytes: int

    def __str__(self) -> str:
        return f"{self.vendor.name}:{self.arch}"

    def is_of(self, platform: Platform) -> bool:
        """Whether the device is of the platform's vendor and architecture."""
        return (platform.vendor, platform.version) == (self.vendor.name, self.version)


def reported_device(device: torch.device) -> ReportedDevice | None:
    """The device as torch's module for its type reports it; None if torch reports no architecture.

    It initialises that module.
    """
    rows = [row for row in VENDORS.values() if row.device_type == device.type]
    try:
        facts: Any = torch.get_device_module(device).get_device_properties(device)
    except Exception:  # of any vendor's module: none, without a driver, or of the CPU
        return None
    for row in rows:
        arch = row.reported_arch(facts)
        version = row.version_of(arch)
        if version:
            return ReportedDevice(
                vendor=row,
                arch=arch,
                version=version,
                name=facts.name,
                memory_bytes=facts.total_memory,
            )
    return None


def platform_of(
    device: torch.device, detection: Detection, wanted: str | None, *, named: str = "platform"
) -> Platform:
    """The platform of a torch device: its kind among those that were found.

    If torch reports a device's architecture and no probe found the device, torch's report describes
    it. Its runtime is then unknown, unless `wanted` describes it. `wanted` is the configured
    platform, and `named` where it comes from. It decides for a device that torch does not report,
    and for one without an index before torch has initialised devices of its type.

    Raises InvalidInput for a device of a type that was not found, AmbiguousPlatform if several
    platforms remain.
    """
    report = reported_device(device) if _may_ask(device) else None
    alike = tuple(
        platform for platform in detection.platforms if platform.device_type == device.type
    )
    stated = _stated(wanted, device)
    if stated is not None and not (report.is_of(stated) if report else not alike):
        stated = None
    if wanted is not None and stated is None:
        check_named(detection, wanted, named=named)
    if report is not None:
        reported = tuple(platform for platform in alike if report.is_of(platform))
        exact = tuple(platform for platform in reported if platform.name == report.name)
        if reported:
            return replace(detection, platforms=exact or reported).pick()
        described = stated or Platform.parse(str(report), is_here=True)
        memory = described.memory_bytes or report.memory_bytes
        return replace(described, name=report.name, memory_bytes=memory)
    if alike:
        wanted = wanted if wanted is not None and named_platforms(alike, wanted) else None
        return replace(detection, platforms=alike).pick(wanted, named=named)
    if stated is not None:
        return stated
    present = ", ".join(sorted({platform.device_type for platform in detection.platforms}))
    notes = "".join(f"; {reason}" for reason in detection.unserved) or (
        "; if the device is there, name it: VENDOR:ARCH in ATTNMUX_PLATFORM or as platform in "
        "attnmux.toml"
    )
    raise InvalidInput("device", got=str(device), expected=f"one of {present}{notes}")


def check_device(device: torch.device, platform: Platform) -> None:
    """Raise InvalidInput if torch reports another architecture of the device than the platform's.
    Platforms of vendors without a row in the table are not compared."""
    if platform.device_type != device.type or platform.vendor not in VENDORS:
        return
    report = reported_device(device)
    if report is not None and platform.version and not report.is_of(platform):
        raise InvalidInput(
            "context.device",
            got=f"{device}, which torch reports as {report} ({report.name})",
            expected=f"{platform.vendor}:{platform.arch}, for which the backend was decided; decide"
            f" for the device (ATTNMUX_PLATFORM={report}, or platform in attnmux.toml), or take a "
            "device of that architecture",
        )


def _may_ask(device: torch.device) -> bool:
    """Asking initialises the devices of the type, after which a process must not fork."""
    try:
        return device.index is not None or bool(torch.get_device_module(device).is_initialized())
    except Exception:  # of any vendor's module, or none
        return False


def _stated(wanted: str | None, device: torch.device) -> Platform | None:
    """The platform that the setting describes in full, if it is one of the device's type."""
    try:
        platform = Platform.parse(wanted or "", is_here=True)
    except InvalidInput:
        return None
    return platform if platform.device_type == device.type else None
