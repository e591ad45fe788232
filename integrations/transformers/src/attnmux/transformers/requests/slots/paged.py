"""Handing out slots of a KV pool, in whole pages or token by token."""

from __future__ import annotations

import torch

from attnmux.core import InvalidInput
from attnmux.transformers.requests.slots.free_list import FreeList, check_extend, place_extend


class UndoneOnError:
    """A block whose allocations are undone if it raises. It must not free anything.

    Not a generator: one that an interrupt leaves suspended would undo them much later.
    """

    def __init__(self, allocator: PagedAllocator) -> None:
        self._allocator = allocator
        self._mark = allocator.mark()

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._allocator.rewind(self._mark)


def checked_slots(slots: torch.Tensor) -> torch.Tensor:
    """The slots as int64. Raises InvalidInput unless they are [n] int."""
    if slots.dim() != 1 or slots.dtype not in (torch.int32, torch.int64):
        got = f"{str(slots.dtype).removeprefix('torch.')} {list(slots.shape)}"
        raise InvalidInput("slots", got=got, expected="[n] of int32 or int64")
    return slots.to(torch.int64)


class PagedAllocator:
    """Slots of a pool of `size` tokens, as int64 tensors on `device`.

    Page 0 belongs to padding and is never handed out. An allocation that does not fit raises
    PoolExhausted. An allocation that raises, whatever the reason, changes nothing.

    Misuse (a double free, a slot that was never handed out, lengths that contradict each
    other) raises InvalidInput and changes nothing. These checks read values, which is cheap on a
    CPU and synchronises elsewhere, so `debug` is on by default only on a CPU.
    """

    def __init__(
        self, size: int, page_size: int, device: torch.device | str, *, debug: bool | None = None
    ) -> None:
        """Raises InvalidInput unless `size` is whole pages."""
        InvalidInput.check_at_least(1, "page_size", page_size)
        if size < page_size or size % page_size:
            expected = f"whole pages of {page_size} tokens"
            raise InvalidInput("size", got=f"{size} tokens", expected=expected)
        self.size = size
        self.page_size = page_size
        self.device = torch.device(device)
        self.debug = self.device.type == "cpu" if debug is None else debug
        self._free_list = FreeList(
            size // page_size,
            self.device,
            what="KV slots" if page_size == 1 else f"KV pages of {page_size} tokens",
            checked=self.debug,
        )
        # By value, its index in a list that is being checked: finds duplicates without a sort
        self._place = torch.zeros(size + page_size, dtype=torch.int32, device=self.device)

    def available_size(self) -> int:
        """Tokens that the free pages hold."""
        return self.full_available_size()

    def full_available_size(self) -> int:
        """Tokens that the free pages hold, whatever other pools hold for window layers."""
        return self._free_list.available * self.page_size

    def alloc(self, num_tokens: int) -> torch.Tensor:
        """Slots [num_tokens] on fresh pages; the last page may be filled in part."""
        if num_tokens < 0:
            raise InvalidInput("num_tokens", got=num_tokens, expected="at least 0")
        with UndoneOnError(self):
            pages = self.alloc_pages(-(-num_tokens // self.page_size))
            if self.page_size == 1:
                return pages
            offsets = torch.arange(self.page_size, device=self.device)
            return (pages.unsqueeze(1) * self.page_size + offsets).view(-1)[:num_tokens]

    def alloc_pages(self, num_pages: int) -> torch.Tensor:
        """Numbers of fresh pages [num_pages] int64: page p holds the slots from p * page_size on.

        For callers that know on the host when a request needs a page. Raises PoolExhausted, and
        InvalidInput below 0, changing nothing."""
        return self._free_list.take(num_pages)

    def alloc_extend(
        self,
        prefix_lens: torch.Tensor,
        seq_lens: torch.Tensor,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
        *,
        prefix_lens_cpu: torch.Tensor | None = None,
        seq_lens_cpu: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Slots [extend_num_tokens] for the new tokens of B requests, in token order.

        prefix_lens, seq_lens: [B] int, tokens before and after. last_loc: [B] int, the slot of
        the last cached token; ignored if the prefix is empty. A partly filled last page is
        filled before new pages begin. The result is the step's `out_cache_loc`.
        Synchronises to count pages unless the host mirrors of both lengths are given.
        """
        if self.debug:
            check_extend(prefix_lens, seq_lens, last_loc, extend_num_tokens, self.page_size)
            self._check_tails(prefix_lens, seq_lens, last_loc)
        if self.page_size == 1:
            return self.alloc_pages(extend_num_tokens)
        before = prefix_lens if prefix_lens_cpu is None else prefix_lens_cpu
        after = seq_lens if seq_lens_cpu is None else seq_lens_cpu
        num_pages = int((self._page_count(after) - self._page_count(before)).sum())
        with UndoneOnError(self):
            pages = self.alloc_pages(num_pages)
            return place_extend(
                prefix_lens, seq_lens, last_loc, pages, extend_num_tokens, self.page_size
            )

    def mark(self) -> tuple[int, ...]:
        """The state that `rewind` returns to. It costs nothing and holds until the next free."""
        return (self._free_list.available,)

    def rewind(self, mark: tuple[int, ...]) -> None:
        """Undo every allocation since `mark`. Nothing may have been freed since."""
        self._free_list.rewind(mark[0])

    def free(self, slots: torch.Tensor) -> None:
        """Give slots [n] int back. Any slot of a page frees the whole page, once.

        Free the slots of one page in one call: a second call would free it twice.
        Finding the pages of the slots synchronises for page sizes above 1; `free_pages` does not.
        Raises InvalidInput, changing nothing, for a tensor of another shape or dtype.
        """
        slots = checked_slots(slots)
        if self.debug:
            self._check_free(slots)
        self._give(self._pages_once(slots))

    def free_pages(self, pages: torch.Tensor) -> None:
        """Give pages [n] int64 back, each of them once."""
        if self.debug:
            self.free(pages * self.page_size)
        else:
            self._give(pages)

    def check_owned(self, slots: torch.Tensor) -> None:
        """With `debug`, raise InvalidInput unless all of the slots are in use."""
        if self.debug:
            self._free_list.check_in_use(slots // self.page_size)

    def clear(self) -> None:
        """Free every page, even those in use."""
        self._free_list.clear()

    def _page_count(self, lens: torch.Tensor) -> torch.Tensor:
        return (lens + (self.page_size - 1)) // self.page_size

    def _give(self, pages: torch.Tensor) -> None:
        """Take distinct pages [n] int64 back."""
        self._free_list.give(pages)

    def _pages_once(self, slots: torch.Tensor) -> torch.Tensor:
        """The pages of the slots, each once."""
        if self.page_size == 1:
            return slots
        pages = slots // self.page_size
        return pages[self._one_of_each(pages)]

    def _one_of_each(self, values: torch.Tensor) -> torch.Tensor:
        """A bool mask [n] that is True at one place of each distinct value."""
        places = torch.arange(values.numel(), dtype=torch.int32, device=self.device)
        self._place[values] = places
        return self._place[values] == places

    def _check_free(self, slots: torch.Tensor) -> None:
        self._free_list.check_in_use(slots // self.page_size)
        picked = self._one_of_each(slots)
        if not bool(picked.all()):
            raise InvalidInput(
                "slots", got=f"{slots[~picked][:8].tolist()} twice", expected="each slot once"
            )

    def _check_tails(
        self, prefix_lens: torch.Tensor, seq_lens: torch.Tensor, last_loc: torch.Tensor
    ) -> None:
        """Partly filled pages that are continued must be in use."""
        continued = (prefix_lens % self.page_size != 0) & (seq_lens > prefix_lens)
        self._free_list.check_in_use(last_loc[continued].long() // self.page_size)
