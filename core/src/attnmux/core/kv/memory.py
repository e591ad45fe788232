"""Memory of pools: allocations that fail cleanly, and what the host has free."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch

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
