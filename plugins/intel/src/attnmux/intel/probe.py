"""Intel GPUs as the kernel's DRM drivers show them: no Level Zero context is created."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from attnmux.core import Platform

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


class Card(NamedTuple):
    """An Intel GPU of any generation."""

    is_integrated: bool
    address: str
    """On the PCI bus."""
    number: int
    """PCI device id."""
    tiles: int


def probe(root: Path = Path("/"), variables: Mapping[str, str] = {}) -> list[Platform]:
    """One Platform for each distinct kind of Intel GPU with matrix units that Level Zero shows; []
    without any.

    The kernel shows neither the memory nor the number of Xe cores: both stay unknown. The runtime
    is oneAPI's, of the wheel that PyTorch uses or of the installation. `root` is where /sys and
    /opt are; `variables` are those of the environment that hide devices.
    """
    numbers = [card.number for card in _visible(_cards(root), variables) if card.number in BY_ID]
    runtime = _oneapi(root) if numbers else ""
    return [
        replace(
            Platform.parse(f"intel:{BY_ID[number].arch}"),
            name=f"Intel {BY_ID[number].name} [8086:{number:04x}]",
            count=count,
            runtime=runtime,
        )
        for number, count in Counter(numbers).items()
    ]


def _cards(root: Path) -> list[Card]:
    """In the order of Level Zero: GPUs of processors last, else by address. card0-DP-1 and its like
    are connectors, not cards."""
    cards = []
    for path in (root / CARDS).glob("card*"):
        device = path / "device"
        driver = (device / "driver").resolve().name
        if path.name[4:].isdecimal() and _read(device / "vendor") == INTEL and driver in DRIVERS:
            address = device.resolve().name
            cards.append(
                Card(
                    # Device 2 of bus 0 is in the processor's package
                    is_integrated=address.startswith("0000:00:02."),
                    address=address,
                    number=_hex(_read(device / "device")),
                    tiles=len(list(device.glob("tile[0-9]*"))) or 1,
                )
            )
    return sorted(cards)


def _visible(cards: Iterable[Card], variables: Mapping[str, str]) -> list[Card]:
    """The cards that ZE_AFFINITY_MASK names: "1,3" or, with a tile of a card, "1.0,3.1".

    Unless the hierarchy is COMPOSITE, which is the default of all but the data centre's cards, the
    numbers are those of tiles. Numbers without a card are ignored, and an empty mask hides nothing:
    "Affinity Mask" of the Level Zero specification, and Intel's compute-runtime.
    """
    cards = list(cards)
    mask = variables.get("ZE_AFFINITY_MASK", "")
    if mask in ("", "default"):
        return cards
    hierarchy = variables.get("ZE_FLAT_DEVICE_HIERARCHY")
    if hierarchy not in ("COMPOSITE", "FLAT", "COMBINED"):
        is_flat = any(BY_ID[c.number].arch == "xe_hpc" for c in cards if c.number in BY_ID)
    else:
        is_flat = hierarchy != "COMPOSITE"
    units = [
        (f"{place}.{tile}", card) for place, card in enumerate(cards) for tile in range(card.tiles)
    ]
    entries = mask.split(",")
    if is_flat:
        named = [card for unit, (_, card) in enumerate(units) if str(unit) in entries]
    else:
        named = [card for unit, card in units if {unit, unit.partition(".")[0]} & set(entries)]
    return list(dict.fromkeys(named))


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
    from attnmux.core.plugin import installed_version  # noqa: PLC0415  # few children need it

    version = installed_version("intel-sycl-rt") or (root / ONEAPI_COMPILER).resolve().name
    match = re.match(r"\d+(\.\d+)+", version, re.ASCII)
    return f"oneapi {match[0]}" if match else ""
