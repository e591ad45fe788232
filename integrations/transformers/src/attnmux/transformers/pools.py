"""The KV pool of a model: layout, size and memory."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch

from attnmux.core import (
    Decision,
    InvalidInput,
    KVPool,
    LayerSpec,
    MHATokenToKVPool,
    MLATokenToKVPool,
    free_host_memory,
    torch_dtype,
)

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
        free = free_memory(device)
        if free is None or self.fraction is None:
            raise InvalidInput(
                "memory", got=f"a share of an unknown amount on {device}", expected="bytes"
            )
        return int(free * self.fraction)


def free_memory(device: torch.device) -> int | None:
    """Free bytes on a device; None if unknown."""
    if device.type == "cpu":
        return free_host_memory()
    return torch.accelerator.get_memory_info(device)[0]


STORED = ("kind", "tp_k_head_num", "qk_head_dim", "v_head_dim")


def make_pool(
    layers: Sequence[LayerSpec], decision: Decision, *, size: int, device: torch.device
) -> KVPool:
    """A pool for `size` tokens, in whole pages and the KV dtype of the decision.

    It is an MLA pool for latent layers, else one of K and V. Every layer has a buffer of `size`
    tokens, also in an encoder-decoder model, where a layer uses only one kind of token.
    Raises InvalidInput for layers that one pool cannot hold, and PoolExhausted when the memory
    does not suffice.
    """
    dtype = torch_dtype(decision.kv_dtype)
    layer_ids = [layer.layer_id for layer in layers]
    first = alike(layers)
    if first.kind == "mla":
        return MLATokenToKVPool(
            size=size,
            page_size=decision.page_size,
            dtype=dtype,
            layer_ids=layer_ids,
            kv_lora_rank=first.v_head_dim,
            qk_rope_head_dim=first.qk_rope_head_dim,
            device=device,
        )
    return MHATokenToKVPool(
        size=size,
        page_size=decision.page_size,
        dtype=dtype,
        layer_ids=layer_ids,
        num_kv_heads=first.tp_k_head_num,
        head_dim=first.qk_head_dim,
        v_head_dim=first.v_head_dim,
        device=device,
    )


def bytes_per_token(layers: Sequence[LayerSpec], decision: Decision) -> int:
    """Bytes that one token takes in all layers of `make_pool`'s pool.

    Raises InvalidInput for layers that one pool cannot hold.
    """
    dtype = torch_dtype(decision.kv_dtype)
    first = alike(layers)
    if first.kind == "mla":
        return MLATokenToKVPool.bytes_per_token(
            dtype=dtype,
            num_layers=len(layers),
            kv_lora_rank=first.v_head_dim,
            qk_rope_head_dim=first.qk_rope_head_dim,
        )
    return MHATokenToKVPool.bytes_per_token(
        dtype=dtype,
        num_layers=len(layers),
        num_kv_heads=first.tp_k_head_num,
        head_dim=first.qk_head_dim,
        v_head_dim=first.v_head_dim,
    )


def alike(layers: Sequence[LayerSpec], *also: str) -> LayerSpec:
    """A layer whose kind, KV heads and dims, and the fields in `also`, all of them have.

    Raises InvalidInput naming the first that differs.
    """
    if not layers:
        raise InvalidInput("layers", got="none", expected="at least one layer")
    first = layers[0]
    for layer in layers[1:]:
        for name in (*STORED, *also):
            if getattr(layer, name) != getattr(first, name):
                raise InvalidInput(
                    f"layer {layer.layer_id}",
                    got=f"{name} {getattr(layer, name)}",
                    expected=f"{getattr(first, name)}, as in layer {first.layer_id}: one KV pool "
                    "holds all layers",
                )
    return first
