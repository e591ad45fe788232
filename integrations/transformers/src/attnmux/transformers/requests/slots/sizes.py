"""How many tokens the pools hold that a budget of bytes pays for."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from typing import NamedTuple

from attnmux.core import InvalidInput, PoolExhausted


class SWASizes(NamedTuple):
    """Sizes of a `SWAKVPool`'s pools, in tokens."""

    full: int
    swa: int


def tokens_in_budget(budget: int, bytes_per_token: int, page_size: int) -> int:
    """The largest `size` of a pool whose buffers take at most `budget` bytes.

    The size is in whole pages, and the budget also covers the reserved page. bytes_per_token: of
    all layers, as the pools' `bytes_per_token` returns it. A device's allocator rounds each buffer
    up (CUDA's to 2 MiB), so leave a little of the free memory out of the budget.
    Raises PoolExhausted, in bytes, if the reserved page and one more do not fit.
    """
    InvalidInput.check_at_least(1, "bytes_per_token", bytes_per_token)
    InvalidInput.check_at_least(1, "page_size", page_size)
    pages = budget // (bytes_per_token * page_size) - 1
    if pages < 1:
        raise _too_small(budget, 2 * page_size * bytes_per_token)
    return pages * page_size


def swa_tokens_in_budget(
    budget: int,
    full_bytes_per_token: int,
    swa_bytes_per_token: int,
    page_size: int,
    *,
    swa_tokens: Callable[[int], int],
) -> SWASizes:
    """The largest sizes of a `SWAKVPool`'s pools whose buffers take at most `budget` bytes.

    swa_tokens: the tokens that the window pool needs for as many in the full one, at least 1 and
    not falling; more than the full pool's count as equal. They are rounded up to a page.
    Raises PoolExhausted like `tokens_in_budget`.
    """
    for argument, value in (
        ("full_bytes_per_token", full_bytes_per_token),
        ("swa_bytes_per_token", swa_bytes_per_token),
        ("page_size", page_size),
    ):
        InvalidInput.check_at_least(1, argument, value)
    full_page, swa_page = page_size * full_bytes_per_token, page_size * swa_bytes_per_token

    def swa_pages(pages: int) -> int:
        return min(pages, math.ceil(swa_tokens(pages * page_size) / page_size))

    room = budget - full_page - swa_page
    most = max(room // full_page, 0)
    pages = bisect_right(
        range(1, most + 1), room, key=lambda each: each * full_page + swa_pages(each) * swa_page
    )
    if pages < 1:
        raise _too_small(budget, 2 * (full_page + swa_page))
    return SWASizes(full=pages * page_size, swa=swa_pages(pages) * page_size)


def _too_small(budget: int, wanted: int) -> PoolExhausted:
    return PoolExhausted(
        "KV pool of one page and the reserved one, in bytes",
        wanted=wanted,
        available=max(budget, 0),
        hint="give it more memory, or take a smaller KV dtype or page size",
    )
