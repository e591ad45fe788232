"""KV pool of models with window layers: these keep their last tokens in a smaller pool."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from attnmux.core.errors import InvalidInput
from attnmux.core.kv.pool import HasLayerId, KVPool, check_loc


class SWAKVPool(KVPool):
    """Layers that see everything in one pool, layers with a sliding window in another.

    Slots of the request table and of `out_cache_loc` are those of the full pool. `translate` and
    `translate_pages` turn them into the window pool's; writes translate by themselves. A page of
    one pool goes with a page of the other, so that what a kernel reads as pages stays pages.
    Tokens that fell out of every window have no slots in the window pool: they lead to its
    reserved page, which holds finite values and which a kernel may load and give weight 0.
    `SWAAllocator` says which pages go together.
    """

    def __init__(self, *, full: KVPool, swa: KVPool) -> None:
        """Put two pools together. `swa` is as large as the windows of all requests need.

        Raises InvalidInput for pools that differ in page size, dtype or device, or that share a
        layer.
        """
        for field in ("page_size", "dtype", "device"):
            ours, theirs = getattr(full, field), getattr(swa, field)
            if ours != theirs:
                raise InvalidInput(f"swa.{field}", came=theirs, expected=f"{ours}, as in full")
        super().__init__(
            size=full.size,
            page_size=full.page_size,
            dtype=full.dtype,
            layer_ids=sorted((*full.layer_ids, *swa.layer_ids)),
            device=full.device,
        )
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

    @property
    def nbytes(self) -> int:
        return self.full.nbytes + self.swa.nbytes

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        return self._pool_of(layer_id).get_key_buffer(layer_id)

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        return self._pool_of(layer_id).get_value_buffer(layer_id)

    def set_kv_buffer(
        self,
        layer: HasLayerId,
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
        layer: HasLayerId,
        loc: torch.Tensor,
        k_nope: torch.Tensor,
        k_rope: torch.Tensor,
        k_scale: float | None = None,
    ) -> None:
        check_loc(loc)
        pool, loc = self._pool_of(layer.layer_id), self.translate(loc, layer.layer_id)
        pool.set_mla_kv_buffer(layer, loc, k_nope, k_rope, k_scale)

    def read_scales(self, k_scale: float | None, v_scale: float | None) -> tuple[float, float]:
        return self.full.read_scales(k_scale, v_scale)

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
        """Let pages [n] int64 of the full pool go with as many of the window pool."""
        slots = swa_pages.unsqueeze(1) * self.page_size + self._offsets
        for table in self._swa_slots.values():
            table.view(-1, self.page_size)[pages] = slots.to(table.dtype)

    def unpair(self, pages: torch.Tensor) -> None:
        """Let pages [n] int64 of the full pool lead to the window pool's reserved page."""
        for table in self._swa_slots.values():
            table.view(-1, self.page_size)[pages] = 0

    def swa_pages(self, pages: torch.Tensor) -> torch.Tensor:
        """The window pool's pages [n] int64 that go with pages of the full pool; 0 for none."""
        return self._swa_slots[torch.int64][pages * self.page_size] // self.page_size

    def _pool_of(self, layer_id: int) -> KVPool:
        self._layer_index(layer_id)
        return self.swa if self.layers_mapping[layer_id][1] else self.full

    def _table(self, argument: str, indices: torch.Tensor) -> torch.Tensor:
        """The window pool's slots by the full pool's, of the indices' dtype."""
        try:
            return self._swa_slots[indices.dtype]
        except KeyError:
            raise InvalidInput(argument, came=indices.dtype, expected="int32 or int64") from None


def _gather(table: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    return table.index_select(0, indices.reshape(-1)).view(indices.shape)
