"""The machine a backend would run on: the facts, and how to write them down."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from attnmux.core.errors import InvalidInput


@dataclass(frozen=True, kw_only=True, slots=True)
class Vendor:
    """A row of the one table that knows vendors: how to find a device, and who serves it."""

    name: str
    device_type: str
    """torch's word for its devices."""
    runtime: str
    """The runtime's name, and its key in `Platform.parse`; empty for the CPU."""
    arch: str
    """A pattern that an architecture's name matches; group 1 holds what encodes the version."""
    version: Callable[[str], tuple[int, ...]]
    """From group 1 of `arch` to numbers that compare."""
    distribution: str
    nodes: tuple[str, ...] = ()
    """Glob patterns of device nodes whose presence proves a device."""
    pci_vendor: str = ""
    """For devices known only by a render node: the PCI vendor id that sysfs shows."""


def _capability(digits: str) -> tuple[int, ...]:
    """sm90 is (9, 0), sm121 is (12, 1)."""
    return int(digits[:-1]), int(digits[-1])


def _gfx(digits: str) -> tuple[int, ...]:
    """gfx942 is (9, 4, 2), gfx90a is (9, 0, 10), gfx1100 is (11, 0, 0)."""
    return int(digits[:-2]), int(digits[-2], 16), int(digits[-1], 16)


def _generation(digits: str) -> tuple[int, ...]:
    """xe2 is (2,); a name without a number is ()."""
    return (int(digits),) if digits else ()


VENDORS: Mapping[str, Vendor] = {
    row.name: row
    for row in (
        Vendor(
            name="nvidia",
            device_type="cuda",
            runtime="cuda",
            arch=r"sm(\d{2,3})[af]?",
            version=_capability,
            distribution="attnmux-nvidia",
            nodes=("/dev/nvidia[0-9]*",),
        ),
        Vendor(
            name="amd",
            device_type="cuda",
            runtime="rocm",
            arch=r"gfx(\d{1,2}[0-9a-f]{2})",
            version=_gfx,
            distribution="attnmux-amd",
            nodes=("/dev/kfd",),
        ),
        Vendor(
            name="intel",
            device_type="xpu",
            runtime="oneapi",
            arch=r"xe(\d*)(?:_?(?:lp|lpg|lpgplus|hp|hpg|hpc))?",
            version=_generation,
            distribution="attnmux-intel",
            pci_vendor="0x8086",
        ),
        Vendor(
            name="ascend",
            device_type="npu",
            runtime="cann",
            arch=r"()(?:310p|910[a-z]?|910_\d+|950)",
            version=_generation,
            distribution="attnmux-ascend",
            nodes=("/dev/davinci[0-9]*",),
        ),
        Vendor(
            name="cpu",
            device_type="cpu",
            runtime="",
            arch=r"()(?:x86_64|aarch64|arm64|amd64|ppc64le|s390x|riscv64)",
            version=_generation,
            distribution="attnmux-cpu",
        ),
    )
}

UNITS: Mapping[str, int] = {
    **{"": 1, "B": 1},
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", 1)},
    **{f"{prefix}IB": 1024**power for power, prefix in enumerate("KMGT", 1)},
}

GRAMMAR = "VENDOR:ARCH[,KEY=VALUE]…, such as nvidia:sm90,cuda=12.4"


FIELD_TYPES: Mapping[type, tuple[str, ...]] = {
    str: ("vendor", "device_type", "arch", "runtime", "name"),
    tuple: ("version",),
    frozenset: ("features",),
    int: ("count", "memory_bytes", "core_count"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Platform:
    """One kind of device of one machine. Two kinds in one machine are two platforms.

    Raises InvalidInput for a field of another type, and for a vendor, device type or architecture
    that is empty.
    """

    vendor: str
    device_type: str
    """torch's word: "cuda", "xpu", "npu", "cpu", …"""
    arch: str
    """"sm90", "gfx942", "xe2", "910b", "x86_64"."""
    version: tuple[int, ...] = ()
    """The architecture as numbers, compute capability (9, 0) or gfx942's (9, 4, 2); () unknown."""
    features: frozenset[str] = frozenset()
    """"amx", "avx512_bf16", "cxx_compiler", …"""
    runtime: str = ""
    """Name and version, "cuda 13.0"; empty unknown."""
    name: str = ""
    """The product, "NVIDIA H200"."""
    count: int = 1
    memory_bytes: int = 0
    """Of one device; 0 unknown."""
    core_count: int = 0
    """SMs or compute units of one device, or the CPU cores that this process may use; 0 unknown."""

    def __post_init__(self) -> None:
        for kind, names in FIELD_TYPES.items():
            for name in names:
                value = getattr(self, name)
                if not isinstance(value, kind):
                    expected = f"a value of type {kind.__name__}"
                    raise InvalidInput(f"platform, {name}", came=repr(value), expected=expected)
        for name in ("vendor", "device_type", "arch"):
            if not getattr(self, name):
                raise InvalidInput(f"platform, {name}", came="nothing", expected="a name")

    def __str__(self) -> str:
        """As `parse` reads it (without the product's name and the core count)."""
        parts = [f"{self.vendor}:{self.arch}"]
        known = VENDORS.get(self.vendor)
        if known is None:
            parts.append(f"device={self.device_type}")
        if self.runtime:
            key, _, version = self.runtime.partition(" ")
            own = known is not None and known.runtime == key
            parts.append(f"{key}={version}" if own else f"runtime={self.runtime}")
        if self.features:
            parts.append("features=" + "+".join(sorted(self.features)))
        if self.count != 1:
            parts.append(f"count={self.count}")
        if self.memory_bytes:
            parts.append(f"memory={self.memory_bytes}B")
        return ",".join(parts)

    def to_dict(self) -> dict[str, Any]:
        data = asdict(self)
        return {**data, "version": list(self.version), "features": sorted(self.features)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Platform:
        """The inverse of `to_dict`. Raises InvalidInput for a key that is no field."""
        names = {field.name for field in fields(cls)}
        for key in data:
            if key not in names:
                expected = f"the fields {', '.join(sorted(names))}"
                raise InvalidInput("platform", came=f"a field {key!r}", expected=expected)
        given = dict(data)
        given["version"] = tuple(given.get("version", ()))
        given["features"] = frozenset(given.get("features", ()))
        return cls(**given)

    @classmethod
    def parse(cls, text: str) -> Platform:
        """A platform that need not be there: `VENDOR:ARCH[,KEY=VALUE]…`.

        Keys: the vendor's runtime (`cuda`, `rocm`, `oneapi`, `cann`), `features=a+b`, `count`,
        `memory=141GB`. A vendor outside the table also says `device=` (torch's word for its
        devices) and may say `runtime=NAME VERSION`.

        Raises InvalidInput for anything that cannot be read.
        """
        head, *pairs = [part.strip() for part in text.split(",")]
        vendor, colon, arch = (part.strip().lower() for part in head.partition(":"))
        if not (vendor and colon and arch):
            raise InvalidInput("platform", came=repr(text), expected=GRAMMAR)
        given = _pairs(text, pairs)
        row = VENDORS.get(vendor)
        if row is None and "device" not in given:
            raise InvalidInput("platform", came=repr(text), expected=_vendors(vendor))
        version = () if row is None else _arch_version(row, arch)
        start = cls(
            vendor=vendor,
            device_type=row.device_type if row is not None else given.pop("device"),
            arch=arch,
            version=version,
        )
        changes = dict(_read(key, value, row) for key, value in given.items())
        return replace(start, **changes)


def _pairs(text: str, pairs: list[str]) -> dict[str, str]:
    given: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = (part.strip() for part in pair.partition("="))
        if not (key and equals and value):
            raise InvalidInput("platform", came=f"{pair!r} in {text!r}", expected=GRAMMAR)
        if key in given:
            raise InvalidInput("platform", came=f"{key!r} twice", expected="each key once")
        given[key] = value
    return given


def _vendors(vendor: str) -> str:
    near = difflib.get_close_matches(vendor, VENDORS, n=1)
    guess = f" (did you mean {near[0]!r}?)" if near else ""
    return f"a vendor of {', '.join(VENDORS)}{guess}, or device=TYPE for another vendor"


def _arch_version(row: Vendor, arch: str) -> tuple[int, ...]:
    match = re.fullmatch(row.arch, arch, re.ASCII)
    if match is None:
        expected = f"an architecture of {row.name}, matching {row.arch}"
        raise InvalidInput("platform", came=repr(arch), expected=expected)
    return row.version(match[1])


def _read(key: str, value: str, row: Vendor | None) -> tuple[str, Any]:
    runtime = row.runtime if row is not None else ""
    if runtime and key == runtime:
        if not re.fullmatch(r"\d+(\.\d+)*", value, re.ASCII):
            raise InvalidInput(key, came=repr(value), expected="a version such as 12.4")
        return "runtime", f"{key} {value}"
    if key == "runtime" and row is None:
        return "runtime", value
    if key == "features":
        return "features", frozenset(filter(None, value.split("+")))
    if key == "count":
        if not value.isdecimal() or int(value) < 1:
            raise InvalidInput(key, came=repr(value), expected="a positive number of devices")
        return "count", int(value)
    if key == "memory":
        return "memory_bytes", _bytes(value)
    keys = [runtime or "runtime", "features", "count", "memory"]
    raise InvalidInput("platform", came=f"the key {key!r}", expected=f"one of {', '.join(keys)}")


def _bytes(value: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", value)
    if match is None or match[2].upper() not in UNITS:
        raise InvalidInput("memory", came=repr(value), expected="a size such as 141GB or 80GiB")
    return round(float(match[1]) * UNITS[match[2].upper()])
