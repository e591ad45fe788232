"""How many tokens fit a budget of bytes: what an engine asks before it makes its pools."""

from __future__ import annotations

import math
from typing import NamedTuple

from attnmux.core.errors import InvalidInput, PoolExhausted
from attnmux.core.sizes import check_positive


class SWASizes(NamedTuple):
    """Sizes in tokens of the pools of a `SWAKVPool`."""

    full: int
    swa: int


def tokens_in_budget(budget: int, bytes_per_token: int, page_size: int) -> int:
    """The largest `size` of a pool whose buffers take at most `budget` bytes.

    It is whole pages; the reserved page is paid for too. bytes_per_token: of all layers, as the
    pools' `bytes_per_token` say. A device's allocator rounds each buffer up (CUDA's to 2 MiB), so
    a budget leaves a little of what is free.
    Raises PoolExhausted, in bytes, where not even one page fits beside the reserved one.
    """
    check_positive("bytes_per_token", bytes_per_token)
    check_positive("page_size", page_size)
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
    swa_ratio: float,
) -> SWASizes:
    """The largest sizes of a `SWAKVPool`'s pools whose buffers take at most `budget` bytes.

    swa_ratio: tokens in the window pool for each in the full one, above 0 and at most 1, rounded
    up to a page. With requests of S tokens and a window of w it is about (w + page) / S; 1 wastes
    nothing on requests that are shorter than the window.
    Raises InvalidInput for another ratio, PoolExhausted as `tokens_in_budget`.
    """
    if not 0 < swa_ratio <= 1:
        raise InvalidInput("swa_ratio", came=swa_ratio, expected="above 0 and at most 1")
    for argument, value in (
        ("full_bytes_per_token", full_bytes_per_token),
        ("swa_bytes_per_token", swa_bytes_per_token),
        ("page_size", page_size),
    ):
        check_positive(argument, value)
    full_page, swa_page = page_size * full_bytes_per_token, page_size * swa_bytes_per_token

    def swa_pages(pages: int) -> int:
        return math.ceil(pages * swa_ratio)

    room = budget - full_page - swa_page
    pages = int(room / (full_page + swa_ratio * swa_page))
    # The estimate does not round the window pool up, and is a float.
    while pages > 0 and pages * full_page + swa_pages(pages) * swa_page > room:
        pages -= 1
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
