"""Models with window layers, which keep only their last tokens, in a smaller pool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch

from attnmux.core.arguments import check_positive
from attnmux.core.errors import InvalidInput
from attnmux.core.kv.joined import STORAGE, JoinedKVPool, check_alike
from attnmux.core.kv.pool import KVPool


class SWAKVPool(JoinedKVPool):
    """Layers that see everything in one pool, layers with a sliding window in another.

    The request table and `out_cache_loc` hold slots of the full pool. `translate` and
    `translate_pages` convert them to the window pool's; writes do so themselves. Each page of the
    full pool is paired with one of the window pool, so that page tables stay page tables.
    Tokens that fell out of every window have no slots in the window pool: they translate to its
    reserved page, whose values are finite, and which a kernel may load and give weight 0.
    The engine's allocator pairs the pages.
    """

    def __init__(self, *, full: KVPool, swa: KVPool) -> None:
        """Combine two pools. `swa` needs room for the windows of all requests.

        Raises InvalidInput for pools that differ in page size, dtype or device, or that share a
        layer.
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


def _gather(table: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    return table.index_select(0, indices.reshape(-1)).view(indices.shape)


def tokens_behind_window(seq_len: int, sliding_window_size: int, page_size: int) -> int:
    """Tokens at the front of a request, in whole pages, that no later token sees.

    seq_len: tokens of the request. The next one, at place seq_len, sees keys from
    seq_len - sliding_window_size on. With several windows, pass the widest.
    """
    check_positive("page_size", page_size)
    if sliding_window_size < 0:
        return 0
    return max(seq_len - sliding_window_size, 0) // page_size * page_size
