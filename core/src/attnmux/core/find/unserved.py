"""Devices that are present but that no plugin reports."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from attnmux.core.facts.errors import InvalidInput
from attnmux.core.facts.frozen import Plain
from attnmux.core.facts.libraries import installed_version
from attnmux.core.facts.platform import Platform
from attnmux.core.facts.vendors import VENDORS, Vendor
from attnmux.core.find.plugin import PluginFailure


@dataclass(frozen=True, kw_only=True, slots=True)
class UnservedDevice(Plain):
    """A device that is present but that no plugin reports."""

    vendor: str
    evidence: str
    """The path that proves it, or the bus address."""
    distribution: str
    problem: str
    fix: str
    can_be_named: bool = False
    """Whether a setting may describe the device: its plugin works, and only fails to find it."""

    def __str__(self) -> str:
        return (
            f"a device of {self.vendor} is present ({self.evidence}) but {self.problem}: {self.fix}"
        )


def present_vendors(
    served: Collection[str], variables: Mapping[str, str], root: Path
) -> list[tuple[Vendor, str]]:
    """Vendors that are not served, with the proof that a device of theirs is present. Those whose
    devices the user hid on purpose are left out."""
    return [
        (vendor, evidence)
        for vendor in VENDORS.values()
        if vendor.name not in served
        and not any(variables.get(name) in values for name, values in vendor.hiding.items())
        and (evidence := vendor.evidence(root))
    ]


def diagnosis(
    vendor: Vendor,
    evidence: str,
    loaded: Collection[str],
    failures: Sequence[PluginFailure],
    variables: Mapping[str, str],
) -> UnservedDevice:
    """Why no plugin reports a device that is present, and the remedy."""
    hiding = " and ".join(f"{n}={variables[n]}" for n in vendor.hiding if n in variables)
    broken = [row for row in failures if row.distribution == vendor.distribution]
    name_it = (
        f"; or name it, as {vendor.name}:ARCH[,{vendor.runtime}=VERSION] in ATTNMUX_PLATFORM or as "
        f"platform in attnmux.toml (ARCH: {vendor.examples})"
    )
    can_be_named = False
    if broken:
        problem = f"{vendor.distribution} is broken ({broken[0].error})"
        can_be_named = {row.stage for row in broken} == {"platforms"}
        if broken[0].stage == "platforms":
            fix = "repair the driver, its library or the container, as the error says"
        else:
            fix = f"pip install --force-reinstall {vendor.distribution}"
    elif vendor.distribution in loaded:
        problem = f"{vendor.distribution} found none"
        fix = f"{hiding} may hide it, which counts as torch counts; else " if hiding else ""
        fix += "check the driver, or whether that version can find devices yet"
        can_be_named = True
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
        fix=fix + name_it * can_be_named,
        can_be_named=can_be_named,
    )


def named_device(wanted: str | None, unserved: Sequence[UnservedDevice]) -> Platform | None:
    """The device that a setting describes as `Platform.parse` reads it, if no probe finds it but
    something shows that it is there."""
    vendor, colon, _ = (wanted or "").strip().partition(":")
    nameable = {device.vendor for device in unserved if device.can_be_named}
    if wanted is None or not colon or vendor.lower() not in nameable:
        return None
    try:
        return Platform.parse(wanted, is_here=True)
    except InvalidInput:  # `Detection.pick` says what is expected
        return None
