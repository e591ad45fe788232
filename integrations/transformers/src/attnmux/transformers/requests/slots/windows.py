"""Slots of pools with window layers: the pages of both pools are paired, and come together."""

from __future__ import annotations

import torch

from attnmux.core import InvalidInput, SWAKVPool
from attnmux.transformers.requests.slots.free_list import FreeList
from attnmux.transformers.requests.slots.paged import PagedAllocator, UndoneOnError, checked_slots


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
        sees (`SWAKVPool.tokens_behind_window`). With `debug`, raises InvalidInput, without any
        change, for slots that are not in use and for pages whose window page was freed before.
        Raises it always for other shapes and dtypes.
        """
        slots = checked_slots(slots)
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

    def alloc_pages(self, num_pages: int) -> torch.Tensor:
        self._swa_list.check_room(num_pages)
        with UndoneOnError(self):
            pages = super().alloc_pages(num_pages)
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
