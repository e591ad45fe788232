"""AMD devices as AMD SMI or the kernel's topology shows them: no HIP context is created."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from attnmux.core import AttnmuxError, Platform
from attnmux.core.plugin import visible_devices

TOPOLOGY = "sys/class/kfd/kfd/topology/nodes"
ROCM_VERSION = "opt/rocm/.info/version"
AMD = 0x1002
LOCAL_HEAPS = (1, 2)
"""heap_type of a bank of the device's own memory, seen by the CPU or not (kfd_crat.h)."""

DISPLAY_UNITS = 2
"""Display-only GPUs of desktop processors have at most so many compute units. They are ignored:
listed, they would make every such machine with a GPU ambiguous."""


class Device(NamedTuple):
    """One device. All but its number distinguish kinds of devices."""

    arch: str
    name: str
    memory: int
    """Bytes."""
    compute_units: int
    unique_id: int = 0
    """ID of the device itself, as its UUID has it; 0 if it is unknown."""


def probe(root: Path = Path("/"), variables: Mapping[str, str] = {}) -> list[Platform]:
    """One Platform for each distinct kind of AMD device that ROCm shows; [] without the kernel's
    AMD driver.

    Asks AMD SMI if its Python package works, else reads the kernel's topology, which has all
    but the product's name on many boards. `root` is where /sys and /opt are; `variables` are those
    of the environment that hide devices.

    Raises AttnmuxError if the topology is there and cannot be read.
    """
    nodes = root / TOPOLOGY
    if not nodes.is_dir():
        return []
    devices = _of_amdsmi()
    if devices is None:
        devices = list(_of_topology(nodes, root))
    computing = [
        device._replace(unique_id=0)
        for device in _visible(devices, variables)
        if not 0 < device.compute_units <= DISPLAY_UNITS
    ]
    runtime = _rocm(root)
    return [
        replace(
            Platform.parse(f"amd:{device.arch}"),
            name=device.name,
            count=count,
            memory_bytes=device.memory,
            core_count=device.compute_units,
            runtime=runtime,
        )
        for device, count in Counter(computing).items()
    ]


def _visible(devices: list[Device], variables: Mapping[str, str]) -> list[Device]:
    """ROCr hides devices first; HIP counts those that are left, and reads CUDA's variable without
    its own."""
    of_hip = variables.get("HIP_VISIBLE_DEVICES", variables.get("CUDA_VISIBLE_DEVICES"))
    for text in (variables.get("ROCR_VISIBLE_DEVICES"), of_hip):
        devices = visible_devices(
            text, devices, lambda one: (f"GPU-{one.unique_id:016x}",) if one.unique_id else ()
        )
    return devices


def _of_amdsmi() -> list[Device] | None:
    """The devices that AMD SMI reports; None if it is absent, fails or reports too little.

    Its errors are not the probe's: the kernel's topology has the same facts.
    """
    try:
        import amdsmi  # type: ignore[import-not-found]  # noqa: PLC0415  # comes with ROCm, absent elsewhere

        amdsmi.amdsmi_init()
        try:
            return [_asked(amdsmi, handle) for handle in amdsmi.amdsmi_get_processor_handles()]
        finally:
            amdsmi.amdsmi_shut_down()
    except Exception:
        return None


def _asked(amdsmi: ModuleType, handle: object) -> Device:
    """Raises the library's errors, KeyError before ROCm 6.2, InvalidInput for an odd name."""
    info = amdsmi.amdsmi_get_gpu_asic_info(handle)
    # "gfx90a:sramecc+:xnack-" in some versions
    arch = str(info["target_graphics_version"]).lower().partition(":")[0]
    return Device(
        arch=Platform.parse(f"amd:{arch}").arch,
        name=_known(info.get("market_name")),
        memory=int(amdsmi.amdsmi_get_gpu_memory_total(handle, amdsmi.AmdSmiMemoryType.VRAM)),
        compute_units=int(_known(info.get("num_compute_units")) or 0),
        unique_id=int(_known(info.get("asic_serial")) or "0", 16),
    )


def _known(value: object) -> str:
    """AMD SMI writes "N/A" for what it does not know."""
    return "" if value in (None, "N/A") else str(value)


def _of_topology(nodes: Path, root: Path) -> Iterable[Device]:
    for node in sorted(nodes.iterdir(), key=lambda path: path.name.zfill(8)):
        facts = _properties(node / "properties")
        version = facts.get("gfx_target_version", 0)
        # A CPU is a node too, with version 0
        if version and facts.get("vendor_id") == AMD:
            yield Device(
                arch=_arch(version),
                name=_product(root, facts.get("drm_render_minor", 0)),
                memory=_local_memory(node / "mem_banks"),
                compute_units=facts.get("simd_count", 0) // (facts.get("simd_per_cu", 0) or 1),
                unique_id=facts.get("unique_id", 0),
            )


def _arch(version: int) -> str:
    """90402 is gfx942, 90010 is gfx90a: decimal pairs, minor and stepping written in hex."""
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"


def _properties(path: Path) -> dict[str, int]:
    """A file of `name number` lines; empty for a device that this process may not use."""
    try:
        text = path.read_text(encoding="ascii", errors="replace")
    except PermissionError:
        # The kernel refuses the devices that the container's device list leaves out
        return {}
    except OSError as error:
        raise AttnmuxError(f"the topology of AMD devices cannot be read: {error}") from error
    pairs = (line.split() for line in text.splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}


def _local_memory(banks: Path) -> int:
    properties = [_properties(path) for path in banks.glob("*/properties")]
    return sum(b.get("size_in_bytes", 0) for b in properties if b.get("heap_type") in LOCAL_HEAPS)


def _product(root: Path, minor: int) -> str:
    """The name in the board's own memory, which consumer boards leave out."""
    path = root / f"sys/class/drm/renderD{minor}/device/product_name"
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _rocm(root: Path) -> str:
    """ "rocm 6.4.1": of the installation, else of torch's wheel, which brings its own."""
    try:
        text = (root / ROCM_VERSION).read_text(encoding="ascii", errors="replace")
    except OSError:
        from attnmux.core.plugin import installed_version  # noqa: PLC0415  # few children need it

        text = (installed_version("torch") or "").partition("+rocm")[2]
    match = re.match(r"\d+(\.\d+)*", text, re.ASCII)
    return f"rocm {match[0]}" if match else ""
