"""K and V of a layer's tokens as rows, which ranks send each other and pools store."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from attnmux.core import InvalidInput, KVPool, LayerSpec

Stored = tuple[torch.Tensor, ...]
"""K [n, Hkv, D] and V [n, Hkv, Dv], or the one [n, 1, rank + rope] of MLA, in the pool's dtype."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class KVRows:
    """K and V of one layer's tokens, as rows [n, width] that hold the pool's values side by side.

    A pool of 8-bit floats has rounded K and V, and all ranks must read the same values. So they
    send each other the stored values, which are also smaller. Rows are made of integers, since few
    wide values are copied faster, and torch does not copy 8-bit floats everywhere.
    """

    pool: KVPool
    layer: LayerSpec

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the integers."""
        widths = (torch.int64, torch.int32, torch.int16, torch.uint8)
        parts = self._part_bytes
        return next(width for width in widths if not any(size % width.itemsize for size in parts))

    @property
    def width(self) -> int:
        """Integers of a row."""
        return sum(self._part_bytes) // self.dtype.itemsize

    def of(self, k: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        """The rows of K and V, or of the latents [n, 1, rank] and the rotary keys [n, 1, rope], as
        the pool stores them."""
        rows = torch.empty((len(k), self.width), dtype=self.dtype, device=k.device)
        parts, scales = self.split(rows), (self.layer.k_scale, self.layer.v_scale)
        if self.layer.kind == "mla":
            rank = k.shape[-1]
            parts = parts[0][..., :rank], parts[0][..., rank:]
            scales = (self.layer.k_scale,) * 2
        for part, values, scale in zip(parts, (k, second), scales, strict=True):
            part.copy_(KVPool.quantise(values, self.pool.dtype, scale))
        return rows

    def split(self, rows: torch.Tensor) -> Stored:
        """Views of rows as the values that they hold."""
        widths = [size // rows.itemsize for size in self._part_bytes]
        parts = torch.split(rows, widths, dim=1)
        return tuple(
            part.view(self.pool.dtype).view(-1, *shape)
            for part, shape in zip(parts, self._shapes, strict=True)
        )

    def read(self, slots: torch.Tensor) -> Stored:
        """Copies of the values in slots [n] int64 of the request table."""
        slots = self.pool.translate(slots, self.layer.layer_id)
        return tuple(KVPool.gather_rows(buffer, slots) for buffer in self._buffers)

    def write(self, rows: torch.Tensor, slots: torch.Tensor) -> None:
        """Write rows to slots [n] int64 of the request table. Does not synchronise."""
        slots = self.pool.translate(slots, self.layer.layer_id)
        for buffer, part in zip(self._buffers, self.split(rows), strict=True):
            KVPool.scatter_rows(buffer, slots, part)

    def values(self, stored: Stored, dtype: torch.dtype) -> Stored:
        """The stored values, converted to the dtype of Q."""
        scales = self.pool.read_scales(self.layer.k_scale, self.layer.v_scale)
        return tuple(
            part.to(dtype) if scale == 1.0 else part.to(dtype) * scale
            for part, scale in zip(stored, scales, strict=False)
        )

    @property
    def _shapes(self) -> Sequence[tuple[int, int]]:
        """Heads and dims of K and V, or of the whole row of MLA."""
        layer = self.layer
        k = layer.tp_k_head_num, layer.qk_head_dim
        return (k,) if layer.kind == "mla" else (k, (layer.tp_v_head_num, layer.v_head_dim))

    @property
    def _part_bytes(self) -> Sequence[int]:
        return [math.prod(shape) * self.pool.dtype.itemsize for shape in self._shapes]

    @property
    def _buffers(self) -> Stored:
        if self.layer.kind == "mla":
            return (self.pool.get_key_buffer(self.layer.layer_id),)
        return self.pool.get_kv_buffer(self.layer.layer_id)


def check_new(k: torch.Tensor | None, second: torch.Tensor | None) -> Stored:
    """K and V of a call. Raises InvalidInput without them."""
    if k is None or second is None:
        expected = "K and V of the rank's own tokens: in a split step the other ranks wait for them"
        raise InvalidInput("k", got=None, expected=expected)
    return k, second
