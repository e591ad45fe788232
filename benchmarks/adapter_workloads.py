"""What `adapters.py` measures: steps of requests that are all alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from benchmarks.setups import DIM, RANK, ROPE

Q_HEADS, KV_HEADS, DTYPE = 32, 8, torch.bfloat16


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Requests of a step, all alike: keys of each, of which `new` are queries."""

    batch_size: int
    keys: int
    new: int = 1
    page_size: int = 16
    max_context_len: int = 0
    """What the engine allows, as wide as page tables in graphs are; 0: no more than `keys`."""
    kind: Literal["mha", "mla", "nsa"] = "mha"
    q_heads: int = Q_HEADS
    topk: int = 0
    """Keys that an indexer picks for each token, of kind nsa."""
    is_apart: bool = False
    """A latent's Q comes in two tensors, and not as both parts of one row."""

    def __str__(self) -> str:
        kind = "decode" if self.is_decode else f"extend {self.new}"
        room = f" of {self.max_context_len}" if self.max_context_len else ""
        heads = f", {self.kind} of {self.q_heads} heads" if self.is_latent else ""
        topk = f", top {self.topk}" if self.topk else ""
        apart = ", Q apart" if self.is_apart else ""
        return (
            f"{kind} bs {self.batch_size}, ctx {self.keys}{room}, page {self.page_size}"
            f"{heads}{topk}{apart}"
        )

    @property
    def is_decode(self) -> bool:
        return self.new == 1

    @property
    def is_latent(self) -> bool:
        return self.kind != "mha"

    @property
    def kv_bytes(self) -> int:
        """Of one layer: all keys that a step may read, in sparse decode those that are picked."""
        width = RANK + ROPE if self.is_latent else 2 * KV_HEADS * DIM
        seen = self.topk if self.is_decode and self.topk else self.keys
        return self.batch_size * seen * width * DTYPE.itemsize
