"""Layers whose heads or dims differ: a pool for each shape, with one numbering of slots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from attnmux.core.errors import InvalidInput
from attnmux.core.kv.pool import KVPool, check_loc

if TYPE_CHECKING:
    from attnmux.core.layer import LayerSpec

STORAGE = ("page_size", "dtype", "device")
"""What all pools of a model have alike."""


class JoinedKVPool(KVPool):
    """Several pools as one, each with layers of its own. `size` is that of the first pool.

    A request has the same slots in all of them, so that one request table and one allocator serve
    the whole model. `SWAKVPool` is the one whose pools differ in size.
    """

    def __init__(self, pools: Sequence[KVPool]) -> None:
        """Raises InvalidInput without pools, and for pools that share a layer or differ in page
        size, dtype, device or size."""
        if not pools:
            raise InvalidInput("pools", got="none", expected="at least one")
        self._check_alike(pools)
        first = pools[0]
        super().__init__(
            size=first.size,
            page_size=first.page_size,
            dtype=first.dtype,
            layer_ids=sorted(layer_id for pool in pools for layer_id in pool.layer_ids),
            device=first.device,
        )
        self.pools = tuple(pools)
        self._pool_by_layer: Mapping[int, KVPool] = MappingProxyType(
            {layer_id: pool for pool in pools for layer_id in pool.layer_ids}
        )

    @staticmethod
    def _check_alike(pools: Sequence[KVPool]) -> None:
        for place, pool in enumerate(pools[1:], 1):
            check_alike(f"pools[{place}]", pools[0], pool, *STORAGE, "size")

    @property
    def is_strided(self) -> bool:
        return any(pool.is_strided for pool in self.pools)

    @property
    def nbytes(self) -> int:
        return sum(pool.nbytes for pool in self.pools)

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        return self._pool_of(layer_id).get_key_buffer(layer_id)

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        return self._pool_of(layer_id).get_value_buffer(layer_id)

    def get_scale_buffers(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        return self._pool_of(layer_id).get_scale_buffers(layer_id)

    def set_kv_buffer(
        self,
        layer: LayerSpec,
        loc: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        k_scale: float | None = None,
        v_scale: float | None = None,
    ) -> None:
        check_loc(loc)
        pool, loc = self._pool_of(layer.layer_id), self.translate(loc, layer.layer_id)
        pool.set_kv_buffer(layer, loc, k, v, k_scale, v_scale)

    def set_mla_kv_buffer(
        self,
        layer: LayerSpec,
        loc: torch.Tensor,
        k_nope: torch.Tensor,
        k_rope: torch.Tensor,
        k_scale: float | None = None,
    ) -> None:
        check_loc(loc)
        pool, loc = self._pool_of(layer.layer_id), self.translate(loc, layer.layer_id)
        pool.set_mla_kv_buffer(layer, loc, k_nope, k_rope, k_scale)

    def read_scales(self, k_scale: float | None, v_scale: float | None) -> tuple[float, float]:
        return self.pools[0].read_scales(k_scale, v_scale)

    def _pool_of(self, layer_id: int) -> KVPool:
        self._layer_index(layer_id)
        return self._pool_by_layer[layer_id]


def check_alike(argument: str, first: KVPool, other: KVPool, *fields: str) -> None:
    """Raise InvalidInput for the first of the fields that the other pool has another value of."""
    for field in fields:
        ours, theirs = getattr(first, field), getattr(other, field)
        if ours != theirs:
            expected = f"{ours}, as in the first pool"
            raise InvalidInput(f"{argument}.{field}", got=theirs, expected=expected)
