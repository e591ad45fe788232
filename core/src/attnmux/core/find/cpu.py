"""Core's own probe: the CPU, which every machine has."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from pathlib import Path

from attnmux.core.facts.platform import Platform
from attnmux.core.facts.vendors import VENDORS

FEATURES = {
    "avx2": ("avx2", "fma", "f16c"),
    "avx512": ("avx512f", "avx512bw", "avx512vl"),
    "avx512_bf16": ("avx512_bf16",),
    "avx512_vnni": ("avx512_vnni",),
    "amx": ("amx_tile", "amx_bf16"),
    "neon": ("asimd",),
    "sve": ("sve",),
    "bf16": ("bf16",),
}
"""Feature → the flags of /proc/cpuinfo that it needs."""

COMPILERS = ("c++", "g++", "clang++")

CPUINFO = Path("/proc/cpuinfo")
CGROUP = Path("/sys/fs/cgroup/memory.max")


def probe_cpu(cpuinfo: Path = CPUINFO, cgroup: Path = CGROUP) -> Platform:
    """The CPU with its instruction sets, and the cores and memory that this process may use.

    The feature "cxx_compiler" means that kernels can be compiled here.
    """
    flags, name = _flags_and_name(cpuinfo)
    features = {word for word, needed in FEATURES.items() if flags.issuperset(needed)}
    if any(map(shutil.which, COMPILERS)):
        features.add("cxx_compiler")
    return Platform(
        vendor="cpu",
        device_type="cpu",
        arch=_arch(),
        features=frozenset(features),
        name=name,
        memory_bytes=_memory(cgroup),
        core_count=_cores(),
    )


def bare_cpu() -> Platform:
    """The CPU with its architecture alone."""
    return Platform(vendor="cpu", device_type="cpu", arch=_arch())


def _arch() -> str:
    arch = platform.machine().lower() or "unknown"
    return VENDORS["cpu"].aliases.get(arch, arch)


def _flags_and_name(cpuinfo: Path) -> tuple[frozenset[str], str]:
    if not sys.platform.startswith("linux"):
        return _asked_elsewhere()
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return frozenset(), platform.processor()
    # One block for each core, with the same flags: the first one is enough
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", text, re.MULTILINE)
    name = re.search(r"^model name\s*:\s*(.*)$", text, re.MULTILINE)
    return frozenset(flags[1].split() if flags else ()), name[1].strip() if name else ""


def _asked_elsewhere() -> tuple[frozenset[str], str]:
    """Without /proc: py-cpuinfo, which takes a second."""
    import cpuinfo  # type: ignore[import-not-found]  # noqa: PLC0415  # both: installed only outside Linux

    info = cpuinfo.get_cpu_info()
    return frozenset(info.get("flags", ())), str(info.get("brand_raw", ""))


def _cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on every operating system
        return os.cpu_count() or 0


def _memory(cgroup: Path) -> int:
    """Physical memory, or the container's limit if that is lower; 0 unknown."""
    try:
        physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 0
    try:
        limit = cgroup.read_text(encoding="ascii").strip()
    except OSError:
        return physical
    return min(physical, int(limit)) if limit.isdecimal() else physical
