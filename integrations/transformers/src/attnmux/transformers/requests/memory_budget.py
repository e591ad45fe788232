"""How much memory the KV pool may take."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from attnmux.core import InvalidInput, KVPool

UNITS: Mapping[str, int] = MappingProxyType(
    {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
    | {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
)

EXAMPLES = "bytes as in 2GB or 512MiB, or a share of the device's free memory as in 80%"


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryBudget:
    """Bytes, or a share of the memory that is free on the device after loading the weights.

    Raises InvalidInput unless it is one of the two, and positive.
    """

    nbytes: int | None = None
    fraction: float | None = None

    def __post_init__(self) -> None:
        if (self.nbytes is None) == (self.fraction is None):
            raise InvalidInput("memory", got=self, expected="either nbytes or fraction")
        if self.nbytes is not None and self.nbytes < 1:
            raise InvalidInput("memory", got=f"{self.nbytes} bytes", expected="at least 1 byte")
        if self.fraction is not None and not 0 < self.fraction <= 1:
            raise InvalidInput("memory", got=f"{self.fraction:%}", expected="above 0%, up to 100%")

    @classmethod
    def parse(cls, text: str) -> MemoryBudget:
        """Read "2GB", "512MiB", "1000000" or "80%". Raises InvalidInput for anything else."""
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:(%)|([kmgt]i?)?b?)\s*", text, re.IGNORECASE)
        if match is None:
            raise InvalidInput("memory", got=repr(text), expected=EXAMPLES)
        number, percent, unit = match.groups()
        if percent:
            return cls(fraction=float(number) / 100)
        return cls(nbytes=int(float(number) * UNITS[(unit or "").lower()]))

    def resolve(self, device: torch.device) -> int:
        """Bytes on a device. Raises InvalidInput for a share of an unknown amount."""
        if self.nbytes is not None:
            return self.nbytes
        free = KVPool.free_memory(device)
        if free is None or self.fraction is None:
            raise InvalidInput(
                "memory", got=f"a share of an unknown amount on {device}", expected="bytes"
            )
        return int(free * self.fraction)
