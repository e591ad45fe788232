"""Memory of pools: allocations that fail cleanly, and the host's free memory."""

from __future__ import annotations

import contextlib
import errno
import math
import mmap
from collections.abc import Sequence
from pathlib import Path

import torch

from attnmux.core.facts.errors import PoolExhausted

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
HUGE_PAGE = 2 << 20


def allocate_zeroed(
    shapes: Sequence[tuple[int, ...]],
    *,
    dtype: torch.dtype,
    device: torch.device,
    what: str,
    hint: str,
) -> list[torch.Tensor]:
    """A zeroed tensor for each shape: all of them or none.

    `what` names the memory in the error, and `hint` the setting to lower.
    Raises PoolExhausted, in bytes, when the device has no room. On a CPU the free memory is checked
    first: Linux grants more than it has, and kills the process when it writes there.
    """
    wanted = sum(map(math.prod, shapes)) * dtype.itemsize
    if device.type == "cpu":
        free = free_memory(device)
        if free is not None and wanted > free:
            raise _exhausted(what, wanted, free, hint)
    tensors: list[torch.Tensor] = []
    try:
        for shape in shapes:
            # As bytes: torch does not fill 4-bit floats
            raw = torch.uint8 if dtype.itemsize == 1 else dtype
            tensors.append(zeros(shape, dtype=raw, device=device).view(dtype))
    except (RuntimeError, OSError) as error:
        if not _is_out_of_memory(error):
            raise
        tensors.clear()
        raise _exhausted(what, wanted, free_memory(device) or 0, hint) from error
    return tensors


def zeros(shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Like `torch.zeros`; on CPUs in pages of 2 MiB, if Linux offers them on request.

    Rows of a pool lie apart: with pages of 4 KiB, nearly each read would look up another one. A
    page takes memory and time when it is first written.
    """
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or size < HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(shape, dtype=dtype, device=device)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, size + HUGE_PAGE, flags=flags)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    begin = -whole.data_ptr() % HUGE_PAGE
    return whole[begin : begin + size].view(dtype).view(shape)


def free_memory(device: torch.device) -> int | None:
    """Bytes that this process can still take from a device; None if that is unknown.

    On a CPU it is the lesser of the kernel's MemAvailable and the rest of the control group's limit
    (version 2, as a container sees its own). The group's reclaimable file cache counts as free.
    """
    if device.type != "cpu":
        return torch.accelerator.get_memory_info(device)[0]
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


def _is_out_of_memory(error: RuntimeError | OSError) -> bool:
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    # The CPU allocator raises a bare RuntimeError, which only its text identifies
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


def _exhausted(what: str, wanted: int, available: int, hint: str) -> PoolExhausted:
    return PoolExhausted(f"{what}, in bytes", wanted=wanted, available=available, hint=hint)
