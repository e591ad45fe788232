"""What `triton_gpu.py` measures: steps by their sizes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from benchmarks.setups import COLD_BYTES, DIM, RANK, ROPE

from attnmux.core.dtypes import torch_dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Requests of a step, each of `keys` tokens of which the last `new` are queries."""

    family: str
    """"decode", "fp8", "mla" or "extend"."""
    batch_size: int
    keys: int
    new: int = 1
    page_size: int = 16
    q_heads: int = 32
    kv_heads: int = 8
    is_uneven: bool = False
    """Lengths between 0.05 and 1.95 times `keys`, the same ones in every run."""
    dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"

    def __str__(self) -> str:
        keys = f"{self.keys}{'~' if self.is_uneven else ''}"
        if self.family == "extend":
            size = f"{self.batch_size} x {self.new} on {self.keys - self.new}"
        else:
            size = f"bs {self.batch_size}, ctx {keys}"
        heads = f"{self.q_heads} heads" if self.is_latent else f"{self.q_heads}/{self.kv_heads}"
        return f"{size}, page {self.page_size}, {heads}"

    @property
    def is_latent(self) -> bool:
        return self.family == "mla"

    @property
    def lens(self) -> list[int]:
        if not self.is_uneven:
            return [self.keys] * self.batch_size
        drawn = torch.Generator().manual_seed(1)
        factors = (
            0.05 + 1.9 * torch.rand((), generator=drawn).item() for _ in range(self.batch_size)
        )
        return [max(1, int(self.keys * factor)) for factor in factors]

    @property
    def kv_bytes(self) -> int:
        """Of one layer: what decode must read."""
        width = RANK + ROPE if self.is_latent else 2 * self.kv_heads * DIM
        return sum(self.lens) * width * torch_dtype(self.kv_dtype).itemsize

    @property
    def flops(self) -> int:
        """Of one layer's two products over the keys that each query sees."""
        seen = sum(length * self.new - self.new * (self.new - 1) // 2 for length in self.lens)
        return 2 * seen * self.q_heads * (2 * RANK + ROPE if self.is_latent else 2 * DIM)

    def layers(self, device: torch.device) -> int:
        """As many as a cold cache needs when one graph runs them; one where it is flushed."""
        if self.family == "extend":
            return 1
        return max(2, math.ceil(COLD_BYTES / self.kv_bytes)) if device.type == "cuda" else 2


WORKLOADS = (
    *(
        Workload(family="decode", batch_size=size, keys=keys, page_size=page)
        for size, keys, page in (
            (1, 4096, 16),
            (1, 65536, 16),
            (16, 4096, 1),
            (16, 4096, 16),
            (64, 4096, 1),
            (64, 4096, 64),
            (128, 2048, 16),
            (64, 16384, 16),
        )
    ),
    Workload(family="decode", batch_size=64, keys=8192, is_uneven=True),
    Workload(family="decode", batch_size=64, keys=4096, q_heads=64),
    Workload(family="decode", batch_size=64, keys=2048, kv_heads=32),
    *(
        Workload(family="fp8", batch_size=64, keys=keys, kv_dtype="fp8_e4m3")
        for keys in (4096, 16384)
    ),
    *(
        Workload(family="mla", batch_size=size, keys=keys, q_heads=heads, kv_heads=1, page_size=64)
        for size, keys, heads in ((1, 8192, 16), (64, 4096, 16), (64, 4096, 128), (128, 8192, 16))
    ),
    *(
        Workload(family="extend", batch_size=size, keys=new + prefix, new=new, page_size=page)
        for size, new, prefix, page in (
            (1, 8192, 0, 16),
            (8, 2048, 0, 1),
            (4, 512, 8192, 16),
            (1, 32768, 0, 64),
        )
    ),
)
_HALF: dict[str, Any] = {"batch_size": 2, "dtype": "float16", "kv_dtype": "float16"}
TINY = (
    Workload(family="decode", keys=40, is_uneven=True, q_heads=4, kv_heads=2, **_HALF),
    Workload(family="fp8", keys=40, q_heads=4, kv_heads=2, **{**_HALF, "kv_dtype": "fp8_e5m2"}),
    Workload(family="mla", keys=40, q_heads=16, kv_heads=1, page_size=64, **_HALF),
    Workload(family="extend", keys=40, new=24, q_heads=4, kv_heads=2, **_HALF),
)
"""In float16: Triton's interpreter does not multiply bfloat16."""
