"""The batch sizes that graphs are captured for, and the one that a batch is padded to."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from attnmux.core.errors import InvalidInput
from attnmux.core.sizes import check_positive

MAX_GRAPH_BATCH_SIZE = 160


def graph_batch_sizes(
    *,
    pool_size: int,
    max_batch_size: int | None = None,
    padding: bool = True,
    speculation: bool = False,
    chosen: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """Batch sizes to capture, ascending.

    pool_size: rows of the request table, so no batch is larger. max_batch_size: the largest worth
    a graph; None: 160, or the largest of `chosen`. padding: smaller batches may replay a larger
    graph. chosen: the user's sizes, instead of the default ones.

    Where the largest size exceeds the pool, pool_size - 1 and pool_size are added, so that a full
    pool has a graph; then what exceeds the pool or the maximum is dropped.
    Raises InvalidInput for sizes below 1 and where none is left.
    """
    check_positive("pool_size", pool_size)
    if chosen is not None:
        if not chosen or min(chosen) < 1:
            raise InvalidInput("chosen", came=list(chosen), expected="batch sizes from 1 up")
        sizes = set(chosen)
    elif speculation:
        sizes = set(range(1, 33))
    elif padding:
        sizes = {1, 2, 4, *range(8, 161, 8)}
    else:
        sizes = {*range(1, 33), 64, 96, 128, 160}
    if max_batch_size is None:
        max_batch_size = MAX_GRAPH_BATCH_SIZE if chosen is None else max(sizes)
    check_positive("max_batch_size", max_batch_size)
    if max(sizes) > pool_size:
        sizes |= {pool_size - 1, pool_size}
    limit = min(pool_size, max_batch_size)
    kept = tuple(sorted(size for size in sizes if 1 <= size <= limit))
    if not kept:
        raise InvalidInput(
            "max_batch_size",
            came=max_batch_size,
            expected=f"at least {min(sizes)}, one of the sizes",
        )
    return kept


def padded_size(count: int, sizes: Sequence[int]) -> int | None:
    """The smallest of the ascending sizes that holds `count`; None where the largest does not."""
    place = bisect_left(sizes, count)
    return sizes[place] if place < len(sizes) else None
