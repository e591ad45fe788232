"""Stands for the vendor's management library: what devices there are, without touching them.

A real one asks the driver. This one simulates a device where the variable ACME_SIMULATOR names a
generation, and finds nothing elsewhere, so that an installed example changes no machine's choice.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

GENERATIONS = ("m1", "m2")


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """What the driver says of a device."""

    generation: str
    memory_bytes: int
    core_count: int


def devices() -> list[Device]:
    """The devices of this machine. Raises ValueError for an unknown generation."""
    generation = os.environ.get("ACME_SIMULATOR", "")
    if not generation:
        return []
    if generation not in GENERATIONS:
        raise ValueError(f"ACME_SIMULATOR={generation}: expected {' or '.join(GENERATIONS)}")
    return [Device(generation=generation, memory_bytes=32 * 1024**3, core_count=64)]


def runtime_version() -> str:
    """Of the vendor's runtime, which the driver brings."""
    return "3.1"
