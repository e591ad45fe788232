"""Several pools as one: layers whose heads, dims or KV dtype differ, and window layers in a smaller
pool."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from types import MappingProxyType

import torch

from attnmux.core.contract.arguments import check_tensor
from attnmux.core.contract.layer import LayerSpec
from attnmux.core.contract.pool import KVPool
from attnmux.core.facts.errors import InvalidInput

STORAGE = ("page_size", "device")
"""Fields that are alike in all pools of a model."""


class JoinedKVPool(KVPool):
    """Several pools as one, each with layers of its own. `size` and `dtype` are those of the first
    pool; if dtypes differ, readers take the pool `of_layers` of one dtype.

    A request has the same slots in all of them, so that one request table and one allocator serve
    the whole model. `SWAKVPool` is the one whose pools differ in size.
    """

    def __init__(self, pools: Sequence[KVPool]) -> None:
        """Raises InvalidInput without pools, and for pools that share a layer or differ in page
        size, device or size."""
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

    @property
    def dtypes(self) -> frozenset[torch.dtype]:
        return frozenset().union(*(pool.dtypes for pool in self.pools))

    def of_layers(self, layer_ids: Iterable[int]) -> KVPool:
        wanted = set(layer_ids)
        if len(self.dtypes) == 1 or wanted.isdisjoint(self.layer_ids):
            return self
        part = copy(self)
        part._number([layer_id for layer_id in self.layer_ids if layer_id in wanted])
        part.pools = tuple(
            pool.of_layers(wanted) for pool in self.pools if not wanted.isdisjoint(pool.layer_ids)
        )
        part.dtype = part.pools[0].dtype
        return part

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
        check_tensor("loc", loc, ("T",), None, torch.int64)
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
        check_tensor("loc", loc, ("T",), None, torch.int64)
        pool, loc = self._pool_of(layer.layer_id), self.translate(loc, layer.layer_id)
        pool.set_mla_kv_buffer(layer, loc, k_nope, k_rope, k_scale)

    def read_scales(self, k_scale: float | None, v_scale: float | None) -> tuple[float, float]:
        if len(self.dtypes) > 1:
            names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in self.dtypes))
            expected = "one KV dtype: take the pool `of_layers` of one"
            raise InvalidInput("pool", got=names, expected=expected)
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


class SWAKVPool(JoinedKVPool):
    """Layers that see everything in one pool, layers with a sliding window in another.

    The request table and `out_cache_loc` hold slots of the full pool. `translate` and
    `translate_pages` convert them to the window pool's; writes do so themselves. Each page of the
    full pool is paired with one of the window pool, so that page tables stay page tables.
    Tokens that left every window have no slots in the window pool. They translate to its reserved
    page, whose values are finite: a kernel may load it and give it weight 0. The engine's allocator
    pairs the pages.
    """

    def __init__(self, *, full: KVPool, swa: KVPool) -> None:
        """Combine two pools. `swa` needs room for the windows of all requests.

        Raises InvalidInput for pools that differ in page size or device, or that share a layer.
        """
        super().__init__((full, swa))
        self.full = full
        self.swa = swa
        self.layers_mapping: Mapping[int, tuple[int, bool]] = MappingProxyType(
            {
                layer_id: (index, pool is swa)
                for pool in (full, swa)
                for index, layer_id in enumerate(pool.layer_ids)
            }
        )
        """layer_id -> (index in its pool, whether that is the window pool)."""
        self._swa_slots = {
            dtype: torch.zeros(full.num_slots, dtype=dtype, device=self.device)
            for dtype in (torch.int32, torch.int64)
        }
        self._offsets = torch.arange(self.page_size, device=self.device)

    @staticmethod
    def _check_alike(pools: Sequence[KVPool]) -> None:
        full, swa = pools
        check_alike("swa", full, swa, *STORAGE)

    def group_of(self, layer_id: int) -> int:
        return int(self._pool_of(layer_id) is self.swa)

    def translate(self, slots: torch.Tensor, layer_id: int) -> torch.Tensor:
        if self._pool_of(layer_id) is self.full:
            return slots
        return _gather(self._table("slots", slots), slots)

    def slot_map(self, layer_id: int) -> torch.Tensor | None:
        return None if self._pool_of(layer_id) is self.full else self._swa_slots[torch.int32]

    def translate_pages(self, pages: torch.Tensor, layer_id: int) -> torch.Tensor:
        if self._pool_of(layer_id) is self.full:
            return pages
        first_slots = self._table("pages", pages)[:: self.page_size]
        return _gather(first_slots, pages).floor_divide_(self.page_size)

    def pair(self, pages: torch.Tensor, swa_pages: torch.Tensor) -> None:
        """Pair pages [n] int64 of the full pool with as many of the window pool."""
        slots = swa_pages.unsqueeze(1) * self.page_size + self._offsets
        for table in self._swa_slots.values():
            table.view(-1, self.page_size)[pages] = slots.to(table.dtype)

    def unpair(self, pages: torch.Tensor) -> None:
        """Pair pages [n] int64 of the full pool with the window pool's reserved page."""
        for table in self._swa_slots.values():
            table.view(-1, self.page_size)[pages] = 0

    def swa_pages(self, pages: torch.Tensor) -> torch.Tensor:
        """The window pool's pages [n] int64 paired with pages of the full pool; 0 for none."""
        return self._swa_slots[torch.int64][pages * self.page_size] // self.page_size

    def _table(self, argument: str, indices: torch.Tensor) -> torch.Tensor:
        """The window pool's slots by the full pool's, in the indices' dtype."""
        try:
            return self._swa_slots[indices.dtype]
        except KeyError:
            raise InvalidInput(argument, got=indices.dtype, expected="int32 or int64") from None

    @staticmethod
    def tokens_behind_window(seq_len: int, sliding_window_size: int, page_size: int) -> int:
        """Tokens at the front of a request, in whole pages, that no later token sees.

        seq_len: tokens of the request. The next one, at place seq_len, sees keys from
        seq_len - sliding_window_size on. With several windows, pass the widest.
        """
        InvalidInput.check_at_least(1, "page_size", page_size)
        if sliding_window_size < 0:
            return 0
        return max(seq_len - sliding_window_size, 0) // page_size * page_size


def _gather(table: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    return table.index_select(0, indices.reshape(-1)).view(indices.shape)
