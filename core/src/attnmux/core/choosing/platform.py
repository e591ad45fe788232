"""The machine a backend would run on: the facts, and how to write them down."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any

from attnmux.core.choosing.machine.platform import read_platform
from attnmux.core.choosing.machine.vendors import VENDORS
from attnmux.core.errors import InvalidInput

FIELD_TYPES: Mapping[type, tuple[str, ...]] = {
    str: ("vendor", "device_type", "arch", "runtime", "name"),
    tuple: ("version",),
    frozenset: ("features",),
    int: ("count", "memory_bytes", "core_count"),
}
ITEM_TYPES: Mapping[str, type] = {"version": int, "features": str}
LEAST: Mapping[str, int] = {"count": 1, "memory_bytes": 0, "core_count": 0}


@dataclass(frozen=True, kw_only=True, slots=True)
class Platform:
    """One kind of device of one machine. Two kinds in one machine are two platforms.

    Raises InvalidInput for a field of another type, a vendor, device type or architecture that is
    empty, and a number that is too small.
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
    """Of one device; 0 unknown, or shared with the CPU and not told."""
    core_count: int = 0
    """SMs or compute units of one device, or the CPU cores that this process may use; 0 unknown."""

    def __post_init__(self) -> None:
        for kind, names in FIELD_TYPES.items():
            for name in names:
                _check(name, getattr(self, name), kind)
        for name in ("vendor", "device_type", "arch"):
            if not getattr(self, name):
                raise InvalidInput(f"platform, {name}", came="nothing", expected="a name")

    def __str__(self) -> str:
        """As `parse` reads it (without the product's name and the core count)."""
        parts = [f"{self.vendor}:{self.arch}"]
        known = VENDORS.get(self.vendor)
        if known is None:
            parts.append(f"device={self.device_type}")
            if self.version:
                parts.append("version=" + ".".join(map(str, self.version)))
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
        """The inverse of `to_dict`.

        Raises InvalidInput for a key that is no field, a field that is missing, and a value that
        no field takes.
        """
        names = {field.name for field in fields(cls)}
        for key in data:
            if key not in names:
                expected = f"the fields {', '.join(sorted(names))}"
                raise InvalidInput("platform", came=f"a field {key!r}", expected=expected)
        for field in fields(cls):
            if field.default is MISSING and field.name not in data:
                raise InvalidInput(f"platform, {field.name}", came="nothing", expected="a name")
        given = dict(data)
        for name in ITEM_TYPES.keys() & given.keys():
            if not isinstance(given[name], list):
                raise InvalidInput(f"platform, {name}", came=repr(given[name]), expected="a list")
        given["version"] = tuple(given.get("version", ()))
        given["features"] = frozenset(given.get("features", ()))
        return cls(**given)

    @classmethod
    def parse(cls, text: str) -> Platform:
        """A platform that need not be there: `VENDOR:ARCH[,KEY=VALUE]…`.

        Keys: the vendor's runtime (`cuda`, `rocm`, `oneapi`, `cann`), `features=a+b`, `count`,
        `memory=141GB`. A vendor outside the table also says `device=` (torch's word for its
        devices), may say `version=1.2`, which the table reads off its own vendors' architectures,
        and `runtime=NAME VERSION`; its names are kept as they are written.

        Raises InvalidInput for anything that cannot be read.
        """
        return cls(**read_platform(text))


def _check(name: str, value: object, kind: type) -> None:
    # A bool is an int to Python, and no number of anything
    usable = isinstance(value, kind) and not isinstance(value, bool)
    if not usable:
        expected = f"a value of type {kind.__name__}"
        raise InvalidInput(f"platform, {name}", came=repr(value), expected=expected)
    item = ITEM_TYPES.get(name)
    if item is not None and isinstance(value, (tuple, frozenset)):
        for each in value:
            if not isinstance(each, item) or isinstance(each, bool):
                expected = f"values of type {item.__name__}"
                raise InvalidInput(f"platform, {name}", came=repr(each), expected=expected)
    if isinstance(value, int) and value < LEAST[name]:
        expected = f"a number from {LEAST[name]}"
        raise InvalidInput(f"platform, {name}", came=str(value), expected=expected)
