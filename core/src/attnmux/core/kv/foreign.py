"""KV pools and a request table over an engine's: memory that attnmux uses but did not allocate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from attnmux.core.contract.arguments import described
from attnmux.core.contract.pool import KVPool
from attnmux.core.facts.errors import InvalidInput
from attnmux.core.kv.token_pools import LatentPool, PairPool


class ForeignKVPool(PairPool):
    """K [slots, Hkv, D] and V [slots, Hkv, Dv] of each layer, as views of the engine's cache.

    Slots and heads may be any distance apart, for example if K and V of a head are side by side.
    The values of a head are contiguous. Page 0 is reserved, as in every pool: the engine hands it
    to no request. Layers that share a cache have the same views.
    """

    def __init__(
        self, buffers: Mapping[int, tuple[torch.Tensor, torch.Tensor]], *, page_size: int
    ) -> None:
        """buffers: K and V by layer id, of one dtype and device and with the same slots, in whole
        pages. 8-bit floats that an engine keeps as bytes come as a view of their own dtype.

        Raises InvalidInput for buffers that do not fit this.
        """
        if not buffers:
            raise InvalidInput("buffers", got="none", expected="K and V of at least one layer")
        first = next(iter(buffers.values()))[0]
        super().__init__(**_storage(first, page_size), layer_ids=tuple(buffers))
        self.check_whole_bytes("the memory of an engine")
        for layer_id, pair in buffers.items():
            for buffer in pair:
                _check_buffer(layer_id, buffer, first)
        self._hold(buffers)


class ForeignMLAPool(LatentPool):
    """Latents [slots, 1, rank + rope] of each layer, as views of the engine's cache."""

    def __init__(
        self, buffers: Mapping[int, torch.Tensor], *, page_size: int, kv_lora_rank: int
    ) -> None:
        """buffers: rows of the latent and the rotary key by layer id; else as `ForeignKVPool`.

        Raises InvalidInput for buffers that do not fit this.
        """
        first = next(iter(buffers.values()), torch.empty(0))
        if first.dim() != 3 or first.shape[1] != 1 or not 0 < kv_lora_rank < first.shape[2]:
            expected = f"[slots, 1, {kv_lora_rank} + rope] of at least one layer"
            raise InvalidInput("buffers", got=described(first), expected=expected)
        super().__init__(**_storage(first, page_size), layer_ids=tuple(buffers))
        for layer_id, rows in buffers.items():
            _check_buffer(layer_id, rows, first)
        self._hold(buffers, kv_lora_rank, first.shape[2] - kv_lora_rank)


def foreign_pool(
    buffers: Mapping[int, Any], *, page_size: int, kv_lora_rank: int | None = None
) -> KVPool:
    """A pool over the engine's cache: nothing is copied.

    buffers: (K, V) by layer id, as `ForeignKVPool` takes them; with the kv_lora_rank of MLA, the
    rows of `ForeignMLAPool`. Raises InvalidInput for buffers that do not fit.
    """
    if kv_lora_rank is None:
        return ForeignKVPool(buffers, page_size=page_size)
    return ForeignMLAPool(buffers, page_size=page_size, kv_lora_rank=kv_lora_rank)


def _storage(first: torch.Tensor, page_size: int) -> dict[str, Any]:
    """The arguments of a pool over such buffers, apart from its layers."""
    InvalidInput.check_at_least(1, "page_size", page_size)
    size, dtype, device = first.shape[0] - page_size, first.dtype, first.device
    return {"size": size, "page_size": page_size, "dtype": dtype, "device": device}


def _check_buffer(layer_id: int, buffer: torch.Tensor, first: torch.Tensor) -> None:
    """Raise InvalidInput unless the buffer has the slots, dtype and device of the first."""
    expected = f"{first.dtype} of shape ({first.shape[0]}, heads, dim) on {first.device}"
    if (
        buffer.dim() != 3
        or buffer.shape[0] != first.shape[0]
        or buffer.dtype != first.dtype
        or buffer.device != first.device
    ):
        got = f"{described(buffer)} on {buffer.device}"
        raise InvalidInput(f"buffers, layer {layer_id}", got=got, expected=expected)
    if buffer.stride(-1) != 1:
        raise InvalidInput(
            f"buffers, layer {layer_id}",
            got=f"strides {buffer.stride()}",
            expected="the values of a head next to each other",
        )
