"""Intel GPUs as the kernel's DRM drivers show them: no Level Zero context is created."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from attnmux.core import Platform, installed_version

CARDS = "sys/class/drm"
INTEL = "0x8086"
DRIVERS = ("xe", "i915")
"""A device with another driver, such as vfio-pci, is not for this machine to use."""
ONEAPI_COMPILER = "opt/intel/oneapi/compiler/latest"


class Family(NamedTuple):
    arch: str
    name: str
    ids: tuple[int, ...]
    """PCI device ids, as the kernel's include/drm/intel/pciids.h lists them."""


def _ids(text: str) -> tuple[int, ...]:
    """Hexadecimal numbers and ranges, both ends in."""
    ranges = ((part.partition("-")[0], part.partition("-")[2]) for part in text.split())
    return tuple(n for a, b in ranges for n in range(int(a, 16), int(b or a, 16) + 1))


FAMILIES = (
    Family("xe_hpg", "Alchemist", _ids("5690-5697 56a0-56a6 56b0-56b3 56ba-56bf")),
    Family("xe_hpg", "Data Center GPU Flex", _ids("56c0-56c2")),
    Family("xe_hpc", "Ponte Vecchio", _ids("0b69 0b6e 0bd4-0bdb 0be0 0be1 0be5")),
    Family("xe2", "Lunar Lake", _ids("6420 64a0 64b0")),
    Family("xe2", "Battlemage", _ids("e202 e209 e20b-e20d e210-e212 e215 e216 e220-e223")),
    Family("xe3", "Panther Lake", _ids("b080-b087 b08f b090 b0a0 b0b0")),
    Family("xe3", "Wildcat Lake", _ids("fd80 fd81")),
)
"""Generations with matrix units. Older integrated GPUs are ignored: listed, they would make every
laptop with a second GPU ambiguous."""

BY_ID: Mapping[int, Family] = {number: family for family in FAMILIES for number in family.ids}


def probe(root: Path = Path("/")) -> list[Platform]:
    """One Platform for each distinct kind of Intel GPU with matrix units; [] where there is none.

    The kernel shows neither the memory nor the number of Xe cores: both stay unknown. The runtime
    is oneAPI's, of the wheel that PyTorch uses or of the installation. `root` is where /sys and
    /opt are.
    """
    runtime = _oneapi(root)
    return [
        replace(
            Platform.parse(f"intel:{BY_ID[number].arch}"),
            name=f"Intel {BY_ID[number].name} [8086:{number:04x}]",
            count=count,
            runtime=runtime,
        )
        for number, count in Counter(_devices(root)).items()
    ]


def _devices(root: Path) -> Iterator[int]:
    """PCI device ids, one for each card. card0-DP-1 and its like are connectors, not cards."""
    cards = (path for path in (root / CARDS).glob("card*") if path.name[4:].isdecimal())
    for card in sorted(cards, key=lambda path: int(path.name[4:])):
        device = card / "device"
        driver = (device / "driver").resolve().name
        number = _hex(_read(device / "device"))
        if _read(device / "vendor") == INTEL and driver in DRIVERS and number in BY_ID:
            yield number


def _hex(text: str) -> int:
    return int(text, 16) if re.fullmatch(r"0x[0-9a-fA-F]{1,8}", text) else -1


def _read(path: Path) -> str:
    """Empty for a file that is not there: a card may go away while it is looked at."""
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def _oneapi(root: Path) -> str:
    """ "oneapi 2025.1.1", of the SYCL runtime."""
    version = installed_version("intel-sycl-rt") or (root / ONEAPI_COMPILER).resolve().name
    match = re.match(r"\d+(\.\d+)+", version, re.ASCII)
    return f"oneapi {match[0]}" if match else ""
