"""The machine that a backend would run on, as facts and as text: `VENDOR:ARCH[,KEY=VALUE]…`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from attnmux.core.facts.checks import nearest
from attnmux.core.facts.errors import InvalidInput
from attnmux.core.facts.fields import Check, Name, Positive, Whole, read_fields
from attnmux.core.facts.frozen import plain_fields
from attnmux.core.facts.reading import Fact, read_fact
from attnmux.core.facts.vendors import EXAMPLE, PRODUCTS, VENDORS, Vendor

GRAMMAR = f"PRODUCT or VENDOR:ARCH[,KEY=VALUE]…, such as h100 or {EXAMPLE}"

UNITS: Mapping[str, int] = {
    **{"": 1, "B": 1},
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", 1)},
    **{f"{prefix}IB": 1024**power for power, prefix in enumerate("KMGT", 1)},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Platform(Fact):
    """One kind of device of one machine. Two kinds in one machine are two platforms.

    Raises InvalidInput for a field of another type, a vendor, device type or architecture that is
    empty, and a number that is too small.
    """

    noun = "platform"
    GRAMMAR = GRAMMAR
    """The text that `parse` reads."""

    vendor: Name
    device_type: Name
    """torch's name: "cuda", "xpu", "npu", "cpu", …"""
    arch: Name
    """"sm90", "gfx942", "xe2", "910b", "x86_64"."""
    version: Annotated[tuple[Whole, ...], Check("whole numbers, in a tuple")] = ()
    """The architecture as numbers, compute capability (9, 0) or gfx942's (9, 4, 2); () unknown."""
    features: Annotated[frozenset[str], Check("texts, in a frozenset")] = frozenset()
    """"amx", "avx512_bf16", "cxx_compiler", …"""
    runtime: str = ""
    """Name and version, "cuda 13.0"; empty unknown."""
    name: str = ""
    """The product, "NVIDIA H200"."""
    count: Positive = 1
    memory_bytes: Whole = 0
    """Memory of one device; 0 if it is unknown, or shared with the CPU and not reported."""
    core_count: Whole = 0
    """SMs or compute units of one device, or the CPU cores that this process may use; 0 unknown."""
    is_here: bool = field(default=True, repr=False, compare=False)
    """Whether it is a device of this machine, so that the libraries installed here count. For any
    other, requirements count as met, and so does a runtime that it does not state."""

    def __post_init__(self) -> None:
        read_fields(self, self.noun)

    def to_dict(self) -> dict[str, Any]:
        """The machine alone: another process may run on it."""
        data = plain_fields(self)
        del data["is_here"]
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Platform:
        """The inverse of `to_dict`, a platform that is here. Raises InvalidInput as `read_fact`,
        and for a word on where it is."""
        if "is_here" in data:
            raise InvalidInput("platform", got="a field 'is_here'", expected="the machine alone")
        return read_fact(cls, data, cls.noun)

    @staticmethod
    def device_types() -> frozenset[str]:
        """torch's names of the devices of known vendors."""
        return frozenset(row.device_type for row in VENDORS.values())

    def __str__(self) -> str:
        """Text that `parse` reads, without the product's name and the core count."""
        parts = [f"{self.vendor}:{self.arch}"]
        known = VENDORS.get(self.vendor)
        if known is None:
            parts.append(f"device={self.device_type}")
            if self.version:
                parts.append("version=" + ".".join(map(str, self.version)))
        if self.runtime:
            key, _, version = self.runtime.partition(" ")
            is_runtime = known is not None and known.runtime == key
            parts.append(f"{key}={version}" if is_runtime else f"runtime={self.runtime}")
        if self.features:
            parts.append("features=" + "+".join(sorted(self.features)))
        if self.count != 1:
            parts.append(f"count={self.count}")
        if self.memory_bytes:
            parts.append(f"memory={self.memory_bytes}B")
        return ",".join(parts)

    @staticmethod
    def describes(text: str) -> bool:
        """Whether `parse` is to read the text: a product or VENDOR:ARCH, and no vendor's name."""
        return ":" in text or _parted(text)[0].lower() in PRODUCTS

    @classmethod
    def parse(cls, text: str, *, is_here: bool = False) -> Platform:
        """A platform that is elsewhere, unless it `is_here`: `VENDOR:ARCH[,KEY=VALUE]…`.

        Keys: the vendor's runtime (`cuda`, `rocm`, `oneapi`, `cann`), `features=a+b`, `count`,
        `memory=141GB`. The table of vendors adds torch's device type and the version of the
        architecture. Any other vendor needs `device=`, may give `version=1.2` and
        `runtime=NAME VERSION`, and keeps its names as they are written. A product of the table
        (`h100`, `mi300x`) may stand for VENDOR:ARCH.

        Raises InvalidInput for text that does not follow this grammar.
        """
        head, pairs = _parted(text)
        values = _pairs(text, pairs)
        if (product := PRODUCTS.get(head.lower())) is not None:
            known, arch, name = product
            return cls(**_of_the_table(known, arch, values), name=name, is_here=is_here)
        vendor, colon, arch = (part.strip() for part in head.partition(":"))
        if not (vendor and colon and arch):
            near = nearest(head.lower(), PRODUCTS)
            guess = f"{near}, or {GRAMMAR}" if near else GRAMMAR
            raise InvalidInput("platform", got=repr(text), expected=guess)
        row = VENDORS.get(vendor.lower())
        fields = _of_the_table(row, arch, values) if row else _other(vendor, arch, values)
        return cls(**fields, is_here=is_here)


def _parted(text: str) -> tuple[str, list[str]]:
    """The text before the first comma, and the pairs after it."""
    head, *pairs = [part.strip() for part in text.split(",")]
    return head, pairs


def _of_the_table(row: Vendor, arch: str, given: Mapping[str, str]) -> dict[str, Any]:
    """Fields of a vendor in the table, whose names may be written in any case."""
    arch = row.aliases.get(arch.lower(), arch.lower())
    version = row.version_of(arch)
    if version is None:
        expected = f"an architecture of {row.name}, such as {row.examples}"
        raise InvalidInput("platform", got=repr(arch), expected=expected)
    values: dict[str, Any] = {
        "vendor": row.name,
        "device_type": row.device_type,
        "arch": arch,
        "version": version,
    }
    for key, value in given.items():
        if row.runtime and key == row.runtime:
            values["runtime"] = f"{key} {_numbers(key, value)}"
        else:
            values.update(_shared(key, value.lower(), row.runtime))
    return values


def _other(vendor: str, arch: str, given: Mapping[str, str]) -> dict[str, Any]:
    """Fields of any other vendor, as they are written."""
    if "device" not in given:
        near = nearest(vendor.lower(), VENDORS)
        guess = f" (did you mean {near!r}?)" if near else ""
        expected = f"a vendor of {', '.join(VENDORS)}{guess}, or device=TYPE for another vendor"
        raise InvalidInput("platform", got=f"the vendor {vendor!r}", expected=expected)
    values: dict[str, Any] = {"vendor": vendor, "arch": arch}
    for key, value in given.items():
        if key == "device":
            values["device_type"] = value
        elif key == "version":
            values["version"] = tuple(map(int, _numbers(key, value).split(".")))
        elif key == "runtime":
            values["runtime"] = value
        else:
            values.update(_shared(key, value, "device, version, runtime"))
    return values


def _pairs(text: str, pairs: list[str]) -> dict[str, str]:
    values: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = (part.strip() for part in pair.partition("="))
        key = key.lower()
        if not (key and equals and value):
            raise InvalidInput("platform", got=f"{pair!r} in {text!r}", expected=GRAMMAR)
        if key in values:
            raise InvalidInput("platform", got=f"{key!r} twice", expected="each key once")
        values[key] = value
    return values


def _numbers(key: str, value: str) -> str:
    if not re.fullmatch(r"\d+(\.\d+)*", value, re.ASCII):
        raise InvalidInput(key, got=repr(value), expected="a version such as 12.4")
    return value


def _shared(key: str, value: str, others: str) -> dict[str, Any]:
    """A key that every vendor has; `others` are this vendor's own, for the error."""
    if key == "features":
        return {"features": frozenset(filter(None, map(str.strip, value.split("+"))))}
    if key == "count":
        if not value.isdecimal() or int(value) < 1:
            raise InvalidInput(key, got=repr(value), expected="a positive number of devices")
        return {"count": int(value)}
    if key == "memory":
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", value, re.ASCII)
        if match is None or match[2].upper() not in UNITS:
            raise InvalidInput(key, got=repr(value), expected="a size such as 141GB or 80GiB")
        return {"memory_bytes": round(float(match[1]) * UNITS[match[2].upper()])}
    keys = ", ".join(filter(None, [others, "features", "count", "memory"]))
    raise InvalidInput("platform", got=f"the key {key!r}", expected=f"one of {keys}")
