"""The table of vendors: their devices' names, evidence that one is present, their distribution."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from attnmux.core.facts.frozen import FrozenMapping

Evidence = Callable[[Path], str]
"""From the root of /dev and /sys to the evidence in words; empty if there is none."""

DISPLAY_UNITS = 2
"""Compute units of the display-only GPUs in desktop processors, which are ignored."""


def any_path(patterns: Sequence[str], root: Path) -> str:
    """The first path that matches one of the glob patterns."""
    for pattern in patterns:
        for path in sorted(root.glob(pattern.lstrip("/"))):
            return f"/{path.relative_to(root)}"
    return ""


def render_node(pci_vendor: str, root: Path) -> str:
    """A render node of the PCI vendor, except for a GPU in the CPU's own package."""
    for node in sorted(root.glob("sys/class/drm/renderD*/device")):
        address = node.resolve().name
        # Device 2 of bus 0 is in the package; its other functions are virtual shares
        integrated = re.fullmatch(r"0000:00:02\.[0-7]", address)
        if integrated is None and _read(node / "vendor") == pci_vendor:
            return f"PCI {address}"
    return ""


def compute_node(pci_vendor: int, root: Path) -> str:
    """A GPU of the PCI vendor in the kernel's compute topology (drivers/gpu/drm/amd/amdkfd).

    The driver creates its device node, and lists the CPU, even without a GPU. A GPU that this
    container may not use cannot be read.
    """
    for node in sorted(root.glob("sys/class/kfd/kfd/topology/nodes/*")):
        facts = dict(re.findall(r"^(\w+) (\d+)$", _read(node / "properties"), re.MULTILINE))
        units = int(facts.get("simd_count", 0)) // (int(facts.get("simd_per_cu", 0)) or 1)
        if int(facts.get("vendor_id", 0)) == pci_vendor and units > DISPLAY_UNITS:
            return f"/{node.relative_to(root)}"
    return ""


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""


class Vendor(NamedTuple):
    """A row of the table."""

    name: str
    device_type: str
    """torch's name for its devices."""
    runtime: str
    """The runtime's name, and its key in `Platform.parse`; empty for the CPU."""
    arch: str
    """A pattern for architectures; group 1 encodes the version."""
    examples: str
    """Architectures, for the error about an unknown one."""
    version: Callable[[str], tuple[int, ...]]
    """From group 1 of `arch` to numbers that compare."""
    distribution: str
    evidence: Evidence
    aliases: Mapping[str, str] = FrozenMapping()
    """Other names of architectures."""
    hiding: Mapping[str, tuple[str, ...]] = FrozenMapping()
    """Environment variables that hide devices, with the values by which users hide all."""
    ordering: tuple[str, ...] = ()
    """Environment variables that change the order in which devices are numbered."""
    products: Mapping[str, tuple[str, str]] = FrozenMapping()
    """Architectures and names of products, by the word that users type."""
    reported_arch: Callable[[Any], str] = lambda _: ""
    """The architecture in a device's properties of torch; empty for another vendor's, and if torch
    reports none."""

    @property
    def variables(self) -> tuple[str, ...]:
        return (*self.hiding, *self.ordering)

    def version_of(self, arch: str) -> tuple[int, ...] | None:
        """The version in an architecture's name; None for a name that is not one."""
        match = re.fullmatch(self.arch, arch, re.ASCII)
        return None if match is None else self.version(match[1])


def _capability(digits: str) -> tuple[int, ...]:
    """sm90 is (9, 0), sm121 is (12, 1)."""
    return int(digits[:-1]), int(digits[-1])


def _gfx(digits: str) -> tuple[int, ...]:
    """gfx942 is (9, 4, 2), gfx90a is (9, 0, 10), gfx1100 is (11, 0, 0)."""
    return int(digits[:-2]), int(digits[-2], 16), int(digits[-1], 16)


def _reported_gfx(properties: Any) -> str:  # noqa: ANN401  # torch's, which choosing does not import
    """ROCm's name without features, gfx942 of "gfx942:sramecc+:xnack-"; CUDA's is the product's."""
    name = str(properties.gcnArchName).partition(":")[0]
    return name if name.startswith("gfx") else ""


def _reported_capability(properties: Any) -> str:  # noqa: ANN401  # as above
    """torch has the numbers under ROCm too, where they are no compute capability."""
    return "" if _reported_gfx(properties) else f"sm{properties.major}{properties.minor}"


def _generation(digits: str) -> tuple[int, ...]:
    """xe2 is (2,); a name without a number is ()."""
    return (int(digits),) if digits else ()


NVIDIA_EVIDENCE = (
    "/dev/nvidia[0-9]*",
    # Linux guests of Windows have no device nodes, but the driver's libraries
    "/usr/lib/wsl/lib/libnvidia-ml.so.1",
    "/usr/lib/wsl/drivers/*/libcuda.so*",
    # Jetson's integrated GPU
    "/dev/nvhost-gpu",
    "/dev/nvgpu/igpu[0-9]*",
)
HIDES_ALL = ("", "-1")
HIDING_OF_CUDA: Mapping[str, tuple[str, ...]] = FrozenMapping(
    {"CUDA_VISIBLE_DEVICES": (*HIDES_ALL, "NoDevFiles")}
)

_GEFORCE = "NVIDIA GeForce RTX"
NVIDIA_PRODUCTS: Mapping[str, tuple[str, str]] = FrozenMapping(
    {
        "t4": ("sm75", "Tesla T4"),
        "a100": ("sm80", "NVIDIA A100"),
        "a10": ("sm86", "NVIDIA A10"),
        "a6000": ("sm86", "NVIDIA RTX A6000"),
        "rtx3090": ("sm86", f"{_GEFORCE} 3090"),
        "l4": ("sm89", "NVIDIA L4"),
        "l40s": ("sm89", "NVIDIA L40S"),
        "rtx4090": ("sm89", f"{_GEFORCE} 4090"),
        "h100": ("sm90", "NVIDIA H100"),
        "h200": ("sm90", "NVIDIA H200"),
        "h20": ("sm90", "NVIDIA H20"),
        "gh200": ("sm90", "NVIDIA GH200"),
        "b200": ("sm100", "NVIDIA B200"),
        "gb200": ("sm100", "NVIDIA GB200"),
        "b300": ("sm103", "NVIDIA B300"),
        "gb300": ("sm103", "NVIDIA GB300"),
        "rtx5090": ("sm120", f"{_GEFORCE} 5090"),
        "gb10": ("sm121", "NVIDIA GB10"),
    }
)
"""By compute capability: developer.nvidia.com/cuda-gpus."""
AMD_PRODUCTS: Mapping[str, tuple[str, str]] = FrozenMapping(
    {
        **{name: ("gfx90a", f"AMD Instinct {name.upper()}") for name in ("mi210", "mi250x")},
        **{name: ("gfx942", f"AMD Instinct {name.upper()}") for name in ("mi300x", "mi325x")},
        **{name: ("gfx950", f"AMD Instinct {name.upper()}") for name in ("mi350x", "mi355x")},
        "rx7900xtx": ("gfx1100", "AMD Radeon RX 7900 XTX"),
        "rx9070xt": ("gfx1201", "AMD Radeon RX 9070 XT"),
    }
)
"""By LLVM target: rocm.docs.amd.com, GPU hardware specifications."""

VENDORS: Mapping[str, Vendor] = {
    row.name: row
    for row in (
        Vendor(
            name="nvidia",
            device_type="cuda",
            runtime="cuda",
            arch=r"sm(\d{2,3})[af]?",
            examples="sm80, sm90 or sm100",
            version=_capability,
            distribution="attnmux-nvidia",
            evidence=partial(any_path, NVIDIA_EVIDENCE),
            hiding=HIDING_OF_CUDA,
            ordering=("CUDA_DEVICE_ORDER",),
            products=NVIDIA_PRODUCTS,
            reported_arch=_reported_capability,
        ),
        Vendor(
            name="amd",
            device_type="cuda",
            runtime="rocm",
            arch=r"gfx((?:[6-9]|1\d)[0-9a-f]{2})",
            examples="gfx90a, gfx942 or gfx1100",
            version=_gfx,
            distribution="attnmux-amd",
            evidence=partial(compute_node, 0x1002),
            products=AMD_PRODUCTS,
            reported_arch=_reported_gfx,
            hiding=FrozenMapping(
                {
                    "ROCR_VISIBLE_DEVICES": HIDES_ALL,
                    "HIP_VISIBLE_DEVICES": HIDES_ALL,
                    **HIDING_OF_CUDA,
                }
            ),
        ),
        Vendor(
            name="intel",
            device_type="xpu",
            runtime="oneapi",
            arch=r"xe(\d*)(?:_?(?:lp|lpg|lpgplus|hp|hpg|hpc))?",
            examples="xe2, xe_hpg or xe_hpc",
            version=_generation,
            distribution="attnmux-intel",
            evidence=partial(render_node, "0x8086"),
            hiding=FrozenMapping({"ZE_AFFINITY_MASK": ()}),  # an empty mask hides nothing
            ordering=("ZE_FLAT_DEVICE_HIERARCHY",),
        ),
        Vendor(
            name="ascend",
            device_type="npu",
            runtime="cann",
            arch=r"()(?:310p|910[a-z]?|910_\d+|950)",
            examples="910b, 910_93 or 310p",
            version=_generation,
            distribution="attnmux-ascend",
            evidence=partial(any_path, ("/dev/davinci[0-9]*",)),
            hiding=FrozenMapping({"ASCEND_RT_VISIBLE_DEVICES": HIDES_ALL}),
        ),
        Vendor(
            name="cpu",
            device_type="cpu",
            runtime="",
            arch=r"()(?:x86_64|aarch64|ppc64le|s390x|riscv64)",
            examples="x86_64 or aarch64",
            version=_generation,
            distribution="attnmux-cpu",
            evidence=lambda _: "",
            aliases={"amd64": "x86_64", "arm64": "aarch64"},
        ),
    )
}

PRODUCTS: Mapping[str, tuple[Vendor, str, str]] = {
    product: (row, *about) for row in VENDORS.values() for product, about in row.products.items()
}
"""By the word that users type: the vendor, the architecture and the name."""

EXAMPLE = "nvidia:sm90,cuda=12.4"
"""A platform in words."""
