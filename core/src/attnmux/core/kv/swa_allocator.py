"""Handing out slots of both pools of a model with window layers."""

from __future__ import annotations

import torch

from attnmux.core.errors import InvalidInput
from attnmux.core.kv.allocator import PagedAllocator
from attnmux.core.kv.free_list import FreeList
from attnmux.core.kv.swa import SWAKVPool
from attnmux.core.sizes import check_positive


def tokens_behind_window(seq_len: int, sliding_window_size: int, page_size: int) -> int:
    """Tokens at the front of a request, in whole pages, that no later token sees.

    seq_len: tokens that the request has. The next one, at place seq_len, sees from
    seq_len - sliding_window_size on. With several windows it is the widest that counts.
    """
    check_positive("page_size", page_size)
    if sliding_window_size < 0:
        return 0
    return max(seq_len - sliding_window_size, 0) // page_size * page_size


class SWAAllocator(PagedAllocator):
    """Slots of a `SWAKVPool`: each page of the full pool comes with one of the window pool.

    An allocation that does not fit both raises PoolExhausted and changes nothing. `free_swa` gives
    back the window pool's part of what fell out of the window, while the full pool's stays;
    `free` gives back both. Frees find out how many pages had a part left, which synchronises.
    """

    def __init__(self, pool: SWAKVPool, *, debug: bool | None = None) -> None:
        """Manage the pool's slots, all free. `debug` as in `PagedAllocator`."""
        super().__init__(pool.size, pool.page_size, pool.device, debug=debug)
        self.pool = pool
        self._swa_list = FreeList(
            pool.swa.size // pool.page_size,
            self.device,
            what=f"KV pages of {pool.page_size} tokens for window layers",
            checked=self.debug,
        )

    def available_size(self) -> int:
        """Tokens that can still be allocated: the lesser of both pools."""
        return min(self.full_available_size(), self.swa_available_size())

    def full_available_size(self) -> int:
        """Tokens that the full pool's free pages hold."""
        return super().available_size()

    def swa_available_size(self) -> int:
        """Tokens that the window pool's free pages hold."""
        return self._swa_list.available * self.page_size

    def free_swa(self, slots: torch.Tensor) -> None:
        """Give back the window pool's part of slots [n] int of the full pool.

        Any slot of a page gives back the whole page, so these are whole pages of tokens that no
        later token sees (`tokens_behind_window`). It takes effect at once, in a free group too.
        Raises InvalidInput, changing nothing, for slots that are not in use and for pages whose
        part was given back before, where misuse is looked for.
        """
        slots = slots.to(torch.int64)
        if self.debug:
            self._check_free(slots)
            self._check_paired(slots // self.page_size)
        self._give_swa(self._pages_once(slots))

    def check_owned(self, slots: torch.Tensor) -> None:
        """As `PagedAllocator.check_owned`; that both parts are there is looked for always.

        A shared prefix without its window part would be read as the reserved page, in silence.
        """
        super().check_owned(slots)
        self._check_paired(slots // self.page_size)

    def clear(self) -> None:
        super().clear()
        self._swa_list.clear()
        self.pool.unpair(torch.arange(self.size // self.page_size + 1, device=self.device))

    def _take(self, num_pages: int) -> torch.Tensor:
        self._swa_list.check_room(num_pages)
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
        """A part-filled page that is continued must have both parts."""
        super()._check_tails(prefix_lens, seq_lens, last_loc)
        continued = (prefix_lens % self.page_size != 0) & (seq_lens > prefix_lens)
        self._check_paired(last_loc[continued].long() // self.page_size)

    def _check_paired(self, pages: torch.Tensor) -> None:
        alone = self.pool.swa_pages(pages) == 0
        if bool(alone.any()):
            raise InvalidInput(
                "slots",
                came=f"pages {pages[alone][:8].tolist()}, whose window part was given back",
                expected="pages with both parts",
            )
