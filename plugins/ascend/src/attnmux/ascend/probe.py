"""Ascend NPUs as `npu-smi` or the kernel shows them: no device context is created."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from attnmux.core import AttnmuxError, Platform

NODES = "dev/davinci[0-9]*"
PCI = "sys/bus/pci/devices"
HUAWEI = "0x19e5"
SECONDS = 4.0
"""For npu-smi: it takes one or two with 16 chips, and core abandons a probe after five."""

ARCH_OF_PCI: Mapping[str, str] = {
    "0xd500": "310p",
    "0xd801": "910a",
    "0xd802": "910b",
    "0xd803": "910_93",
}
"""Chip names of the driver package's report tool, such as PCIE_BDF_910_93."""

ARCH_OF_NAME: Mapping[str, str] = {
    r"(Ascend)?310P\w*": "310p",
    r"(Ascend)?910_?93\w*": "910_93",
    r"(Ascend)?910B[1-9]\S*": "910b",
    r"(Ascend)?910(A|B|ProA|ProB|PremiumA)": "910a",
    r"(Ascend)?950\w*": "950",
}
"""910B without a digit is a part of the first generation."""

CANN_VERSIONS = (
    "usr/local/Ascend/cann/*-linux/ascend_toolkit_install.info",
    "usr/local/Ascend/ascend-toolkit/latest/*-linux/ascend_toolkit_install.info",
)

CHIP = re.compile(
    r"^\|\s*\d+\s+(?P<name>\S+)\s*\|[^|\n]*\|[^|\n]*\|\s*\n"
    r"\|\s*\d+(?:\s+\d+)?\s*\|\s*(?P<bus>[0-9A-F]{4,8}:[0-9A-F]{2}:[0-9A-F]{2}\.[0-7])\s*\|"
    r"[^|\n]*/\s*(?P<memory>\d+)\s*\|",
    re.MULTILINE | re.IGNORECASE | re.ASCII,
)
"""The two lines of one chip in the table of `npu-smi info`; the last column is its memory."""


class Device(NamedTuple):
    arch: str
    name: str
    memory: int
    """Bytes; 0 unknown."""


def probe(root: Path = Path("/"), variables: Mapping[str, str] = {}) -> list[Platform]:
    """One Platform for each distinct kind of Ascend NPU that CANN shows; [] without device nodes.

    Asks `npu-smi info`; if that program is missing, the device nodes are counted and the PCI
    bus says what they are. `root` is where /dev, /sys and /usr are; `variables` are those of the
    environment that hide devices.

    Raises AttnmuxError if npu-smi fails, hangs or prints no chip, and if nothing says what the
    devices are.
    """
    nodes = list(root.glob(NODES))
    if not nodes:
        return []
    program = shutil.which("npu-smi")
    if program is not None:
        devices = [_device(match, root) for match in CHIP.finditer(_table(program))]
        if not devices:
            raise AttnmuxError(f"{program} info lists no chip, but {len(nodes)} device nodes exist")
    else:
        devices = [Device(arch=_arch_on_the_bus(root), name="", memory=0)] * len(nodes)
    devices = _visible(devices, variables.get("ASCEND_RT_VISIBLE_DEVICES"))
    runtime = _cann(root)
    return [
        replace(
            Platform.parse(f"ascend:{device.arch}"),
            name=device.name,
            count=count,
            memory_bytes=device.memory,
            runtime=runtime,
        )
        for device, count in Counter(devices).items()
    ]


def _visible(devices: list[Device], text: str | None) -> list[Device]:
    """CANN reads numbers and commas up to the first other character or unknown number: the pages of
    its documentation on this variable."""
    if text is None:
        return devices
    places: list[int] = []
    for entry in text.split(","):
        match = re.match(r"\d+", entry, re.ASCII)
        if match is None or int(match[0]) >= len(devices) or int(match[0]) in places:
            break
        places.append(int(match[0]))
        if match[0] != entry:
            break
    return [devices[place] for place in places]


def _table(program: str) -> str:
    try:
        done = subprocess.run(
            [program, "info"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=SECONDS,
            encoding="utf-8",
            errors="replace",
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise AttnmuxError(f"{program} info gave no answer in {SECONDS:g} s") from error
    except OSError as error:
        raise AttnmuxError(f"{program} cannot be run: {error}") from error
    if done.returncode:
        output = (done.stderr.strip() or done.stdout.strip() or "nothing")[-300:]
        raise AttnmuxError(f"{program} info ended with {done.returncode} and said: {output}")
    return done.stdout


def _device(match: re.Match[str], root: Path) -> Device:
    name, address = match["name"], match["bus"].lower()
    # An A3's chip is a mere "Ascend910", which the name of its PCI device tells apart
    arch = _arch_of(name) or _arch_at(root / PCI / address)
    if not arch:
        raise AttnmuxError(
            f"npu-smi names the chip {name!r} at {address}, which this version of attnmux-ascend "
            "does not know"
        )
    full = name if name.startswith("Ascend") else f"Ascend {name}"
    # npu-smi writes MB and means MiB: 65536 on a chip of 64 GiB
    return Device(arch=arch, name=full, memory=int(match["memory"]) * 1024**2)


def _arch_of(name: str) -> str:
    for pattern, arch in ARCH_OF_NAME.items():
        if re.fullmatch(pattern, name):
            return arch
    return ""


def _arch_at(device: Path) -> str:
    if _read(device / "vendor").strip() != HUAWEI:
        return ""
    return ARCH_OF_PCI.get(_read(device / "device").strip().lower(), "")


def _arch_on_the_bus(root: Path) -> str:
    archs = sorted({arch for path in (root / PCI).glob("*") if (arch := _arch_at(path))})
    if len(archs) != 1:
        listed = " and ".join(archs) or "no NPU that is known"
        raise AttnmuxError(f"npu-smi is not on the PATH, and the PCI bus shows {listed}")
    return archs[0]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _cann(root: Path) -> str:
    """ "cann 8.0" of a file that says version=8.0.RC2: the numbers alone compare."""
    for pattern in CANN_VERSIONS:
        for path in sorted(root.glob(pattern)):
            match = re.search(r"^version=(\d+(?:\.\d+)*)", _read(path), re.MULTILINE | re.ASCII)
            if match:
                return f"cann {match[1]}"
    return ""
