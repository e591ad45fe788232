"""Models with window layers, which keep only their last tokens, in a smaller pool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch

from attnmux.core.arguments import check_positive
from attnmux.core.errors import InvalidInput
from attnmux.core.kv.allocator import PagedAllocator, UndoneOnError
from attnmux.core.kv.joined import STORAGE, JoinedKVPool, check_alike
from attnmux.core.kv.pages import FreeList
from attnmux.core.kv.pool import KVPool


class SWAKVPool(JoinedKVPool):
    """Layers that see everything in one pool, layers with a sliding window in another.

    The request table and `out_cache_loc` hold slots of the full pool. `translate` and
    `translate_pages` convert them to the window pool's; writes do so themselves. Each page of the
    full pool is paired with one of the window pool, so that page tables stay page tables.
    Tokens that fell out of every window have no slots in the window pool: they translate to its
    reserved page, whose values are finite, and which a kernel may load and give weight 0.
    `SWAAllocator` pairs the pages.
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


class SWAAllocator(PagedAllocator):
    """Slots of a `SWAKVPool`: each page of the full pool comes with one of the window pool.

    An allocation that does not fit both raises PoolExhausted. `free_swa` frees
    the window pool's pages of tokens that fell out of the window and keeps the full pool's; `free`
    frees both. Frees synchronise to count the pages that still had a window page.
    """

    def __init__(self, pool: SWAKVPool, *, debug: bool | None = None) -> None:
        """Manage the pool's slots, all free. `debug` is that of `PagedAllocator`."""
        super().__init__(pool.size, pool.page_size, pool.device, debug=debug)
        self.pool = pool
        self._swa_list = FreeList(
            pool.swa.size // pool.page_size,
            self.device,
            what=f"KV pages of {pool.page_size} tokens for window layers",
            checked=self.debug,
        )

    def available_size(self) -> int:
        """Tokens that can be allocated: the lesser of both pools."""
        return min(self.full_available_size(), self.swa_available_size())

    def swa_available_size(self) -> int:
        """Tokens that the window pool's free pages hold."""
        return self._swa_list.available * self.page_size

    def free_swa(self, slots: torch.Tensor) -> None:
        """Free the window pages of slots [n] int of the full pool.

        Any slot of a page frees the whole page, so pass whole pages of tokens that no later token
        sees (`tokens_behind_window`).
        With `debug`, raises InvalidInput, changing nothing, for slots that are not in use and for
        pages whose window page was freed before.
        """
        slots = slots.to(torch.int64)
        if self.debug:
            self._check_free(slots)
            self._check_paired(slots // self.page_size)
        self._give_swa(self._pages_once(slots))

    def move_windows(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Give the window pages of slots sources [n] int64 to slots targets [n] int64.

        Both are whole pages of the full pool with the same K and V. All sources have window pages,
        and no target has one. It takes effect at once and does not synchronise.
        """
        sources = sources[:: self.page_size] // self.page_size
        swa_pages = self.pool.swa_pages(sources)
        self.pool.unpair(sources)
        self.pool.pair(targets[:: self.page_size] // self.page_size, swa_pages)

    def check_owned(self, slots: torch.Tensor, *, windows_from: int = 0) -> None:
        """Like `PagedAllocator.check_owned`; always checks that the window pages from
        slots[windows_from] on are there too.

        A shared prefix without them would silently be read as the reserved page.
        """
        super().check_owned(slots)
        self._check_paired(slots[windows_from:] // self.page_size)

    def mark(self) -> tuple[int, ...]:
        return (*super().mark(), self._swa_list.available)

    def rewind(self, mark: tuple[int, ...]) -> None:
        self.pool.unpair(self._free_list.taken_since(mark[0]))
        super().rewind(mark)
        self._swa_list.rewind(mark[1])

    def clear(self) -> None:
        super().clear()
        self._swa_list.clear()
        self.pool.unpair(torch.arange(self.size // self.page_size + 1, device=self.device))

    def _take(self, num_pages: int) -> torch.Tensor:
        self._swa_list.check_room(num_pages)
        with UndoneOnError(self):
            pages = super()._take(num_pages)
            self.pool.pair(pages, self._swa_list.take(num_pages))
            return pages

    def _give(self, pages: torch.Tensor) -> None:
        self._give_swa(pages)
        super()._give(pages)

    def _give_swa(self, pages: torch.Tensor) -> None:
        swa_pages = self.pool.swa_pages(pages)
        self._swa_list.give(swa_pages[swa_pages > 0])
        self.pool.unpair(pages)

    def _check_tails(
        self, prefix_lens: torch.Tensor, seq_lens: torch.Tensor, last_loc: torch.Tensor
    ) -> None:
        """Partly filled pages that are continued must also have a window page."""
        super()._check_tails(prefix_lens, seq_lens, last_loc)
        continued = (prefix_lens % self.page_size != 0) & (seq_lens > prefix_lens)
        self._check_paired(last_loc[continued].long() // self.page_size)

    def _check_paired(self, pages: torch.Tensor) -> None:
        alone = self.pool.swa_pages(pages) == 0
        if bool(alone.any()):
            raise InvalidInput(
                "slots",
                got=f"pages {pages[alone][:8].tolist()}, whose window pages were freed",
                expected="pages that still have a window page",
            )
