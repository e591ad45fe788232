"""What proves that a device is present, whether or not a plugin serves it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

Evidence = Callable[[Path], str]
"""From the root of /dev and /sys to the words that name the proof; empty where there is none."""

DISPLAY_UNITS = 2
"""Compute units of the graphics that desktop processors carry to draw a screen: nobody means them
by an accelerator, so their presence is no reason to warn."""


def any_path(*patterns: str) -> Evidence:
    """The first path that matches one of the glob patterns."""

    def found(root: Path) -> str:
        for pattern in patterns:
            for path in sorted(root.glob(pattern.lstrip("/"))):
                return f"/{path.relative_to(root)}"
        return ""

    return found


def render_node(pci_vendor: str) -> Evidence:
    """A render node of the PCI vendor, but of the graphics in the CPU's own package."""

    def found(root: Path) -> str:
        for node in sorted(root.glob("sys/class/drm/renderD*/device")):
            address = node.resolve().name
            # Device 2 of bus 0 is in the package; its other functions are shares of it
            own = re.fullmatch(r"0000:00:02\.[0-7]", address)
            if own is None and _read(node / "vendor") == pci_vendor:
                return f"PCI {address}"
        return ""

    return found


def compute_node(pci_vendor: int) -> Evidence:
    """A GPU of the PCI vendor in the kernel's compute topology (drivers/gpu/drm/amd/amdkfd).

    The driver makes its device node, and lists the CPU, where there is no GPU too. A GPU that this
    container may not use cannot be read.
    """

    def found(root: Path) -> str:
        for node in sorted(root.glob("sys/class/kfd/kfd/topology/nodes/*")):
            facts = dict(re.findall(r"^(\w+) (\d+)$", _read(node / "properties"), re.MULTILINE))
            units = int(facts.get("simd_count", 0)) // (int(facts.get("simd_per_cu", 0)) or 1)
            if int(facts.get("vendor_id", 0)) == pci_vendor and units > DISPLAY_UNITS:
                return f"/{node.relative_to(root)}"
        return ""

    return found


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""
