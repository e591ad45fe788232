"""A platform in words: `VENDOR:ARCH[,KEY=VALUE]…`, read into the fields of a Platform."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from attnmux.core.choosing.common.checks import nearest
from attnmux.core.choosing.machine.vendors import EXAMPLE, VENDORS, Vendor
from attnmux.core.errors import InvalidInput

GRAMMAR = f"VENDOR:ARCH[,KEY=VALUE]…, such as {EXAMPLE}"

UNITS: Mapping[str, int] = {
    **{"": 1, "B": 1},
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", 1)},
    **{f"{prefix}IB": 1024**power for power, prefix in enumerate("KMGT", 1)},
}


def read_platform(text: str) -> dict[str, Any]:
    """The fields that the text says. Raises InvalidInput for anything that cannot be read."""
    head, *pairs = [part.strip() for part in text.split(",")]
    vendor, colon, arch = (part.strip() for part in head.partition(":"))
    if not (vendor and colon and arch):
        raise InvalidInput("platform", came=repr(text), expected=GRAMMAR)
    given = _pairs(text, pairs)
    row = VENDORS.get(vendor.lower())
    return _of_the_table(row, arch, given) if row is not None else _other(vendor, arch, given)


def _of_the_table(row: Vendor, arch: str, given: Mapping[str, str]) -> dict[str, Any]:
    """What the table knows need not be said, and may be written in any case."""
    arch = row.aliases.get(arch.lower(), arch.lower())
    found: dict[str, Any] = {
        "vendor": row.name,
        "device_type": row.device_type,
        "arch": arch,
        "version": _arch_version(row, arch),
    }
    for key, value in given.items():
        if row.runtime and key == row.runtime:
            found["runtime"] = f"{key} {_numbers(key, value)}"
        else:
            found.update(_shared(key, value.lower(), row.runtime))
    return found


def _other(vendor: str, arch: str, given: Mapping[str, str]) -> dict[str, Any]:
    """What another vendor's plugin calls its devices, as it is written."""
    if "device" not in given:
        raise InvalidInput("platform", came=f"the vendor {vendor!r}", expected=_vendors(vendor))
    found: dict[str, Any] = {"vendor": vendor, "arch": arch}
    for key, value in given.items():
        if key == "device":
            found["device_type"] = value
        elif key == "version":
            found["version"] = tuple(map(int, _numbers(key, value).split(".")))
        elif key == "runtime":
            found["runtime"] = value
        else:
            found.update(_shared(key, value, "device, version, runtime"))
    return found


def _pairs(text: str, pairs: list[str]) -> dict[str, str]:
    given: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = (part.strip() for part in pair.partition("="))
        key = key.lower()
        if not (key and equals and value):
            raise InvalidInput("platform", came=f"{pair!r} in {text!r}", expected=GRAMMAR)
        if key in given:
            raise InvalidInput("platform", came=f"{key!r} twice", expected="each key once")
        given[key] = value
    return given


def _vendors(vendor: str) -> str:
    near = nearest(vendor.lower(), VENDORS)
    guess = f" (did you mean {near!r}?)" if near else ""
    return f"a vendor of {', '.join(VENDORS)}{guess}, or device=TYPE for another vendor"


def _arch_version(row: Vendor, arch: str) -> tuple[int, ...]:
    match = re.fullmatch(row.arch, arch, re.ASCII)
    if match is None:
        expected = f"an architecture of {row.name}, such as {row.examples}"
        raise InvalidInput("platform", came=repr(arch), expected=expected)
    return row.version(match[1])


def _numbers(key: str, value: str) -> str:
    if not re.fullmatch(r"\d+(\.\d+)*", value, re.ASCII):
        raise InvalidInput(key, came=repr(value), expected="a version such as 12.4")
    return value


def _shared(key: str, value: str, others: str) -> dict[str, Any]:
    """The keys that every vendor has; `others`: those that this one has too."""
    if key == "features":
        return {"features": frozenset(filter(None, map(str.strip, value.split("+"))))}
    if key == "count":
        if not value.isdecimal() or int(value) < 1:
            raise InvalidInput(key, came=repr(value), expected="a positive number of devices")
        return {"count": int(value)}
    if key == "memory":
        return {"memory_bytes": _bytes(value)}
    keys = ", ".join(filter(None, [others, "features", "count", "memory"]))
    raise InvalidInput("platform", came=f"the key {key!r}", expected=f"one of {keys}")


def _bytes(value: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", value, re.ASCII)
    if match is None or match[2].upper() not in UNITS:
        raise InvalidInput("memory", came=repr(value), expected="a size such as 141GB or 80GiB")
    return round(float(match[1]) * UNITS[match[2].upper()])
