"""Memory of pools: how many tokens a budget of bytes holds, and allocations that fail cleanly."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from attnmux.core.arguments import check_positive
from attnmux.core.errors import PoolExhausted

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def allocate_zeroed(
    shapes: Sequence[tuple[int, ...]],
    *,
    dtype: torch.dtype,
    device: torch.device,
    what: str,
    hint: str,
) -> list[torch.Tensor]:
    """A zeroed tensor for each shape: all of them or none.

    `what` names the memory in the error and `hint` says what to lower.
    Raises PoolExhausted, in bytes, when the device has no room. On a CPU the free memory is checked
    first: Linux grants more than it has, and kills the process when it writes there.
    """
    wanted = sum(map(math.prod, shapes)) * dtype.itemsize
    if device.type == "cpu":
        free = free_host_memory()
        if free is not None and wanted > free:
            raise _exhausted(what, wanted, free, hint)
    tensors: list[torch.Tensor] = []
    try:
        for shape in shapes:
            # As bytes: torch does not fill 4-bit floats
            raw = torch.uint8 if dtype.itemsize == 1 else dtype
            tensors.append(torch.zeros(shape, dtype=raw, device=device).view(dtype))
    except RuntimeError as error:
        if not _is_out_of_memory(error):
            raise
        tensors.clear()
        raise _exhausted(what, wanted, _free_memory(device), hint) from error
    return tensors


def free_host_memory() -> int | None:
    """Bytes that this process can still take from the host; None where that is unknown.

    The lesser of the kernel's MemAvailable and the rest of the control group's limit (version 2,
    as a container sees its own), whose reclaimable file cache counts as free.
    """
    limits = [limit for limit in (_machine_free(), _cgroup_free()) if limit is not None]
    return min(limits) if limits else None


def _machine_free() -> int | None:
    kilobytes = _fields(_MEMINFO).get("MemAvailable:")
    return None if kilobytes is None else kilobytes * 1024


def _cgroup_free() -> int | None:
    try:
        limit = int((_CGROUP / "memory.max").read_text(encoding="ascii"))
        used = int((_CGROUP / "memory.current").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None  # no control group, or no limit ("max")
    cache = _fields(_CGROUP / "memory.stat").get("inactive_file", 0)
    return max(limit - used + cache, 0)


def _fields(path: Path) -> dict[str, int]:
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except OSError:
        return {}
    return {words[0]: int(words[1]) for words in map(str.split, lines) if len(words) > 1}


def _free_memory(device: torch.device) -> int:
    if device.type == "cpu":
        return free_host_memory() or 0
    free, _total = torch.accelerator.get_memory_info(device)
    return free


def _is_out_of_memory(error: RuntimeError) -> bool:
    # The CPU allocator raises a bare RuntimeError, which only its text identifies
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


def _exhausted(what: str, wanted: int, available: int, hint: str) -> PoolExhausted:
    return PoolExhausted(f"{what}, in bytes", wanted=wanted, available=available, hint=hint)


class SWASizes(NamedTuple):
    """Sizes of a `SWAKVPool`'s pools, in tokens."""

    full: int
    swa: int


def tokens_in_budget(budget: int, bytes_per_token: int, page_size: int) -> int:
    """The largest `size` of a pool whose buffers take at most `budget` bytes.

    The size is in whole pages, and the budget also covers the reserved page. bytes_per_token: of
    all layers, as the pools' `bytes_per_token` returns it. A device's allocator rounds each buffer
    up (CUDA's to 2 MiB), so leave a little of the free memory out of the budget.
    Raises PoolExhausted, in bytes, where the reserved page and one more do not fit.
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
        check_positive(argument, value)
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
