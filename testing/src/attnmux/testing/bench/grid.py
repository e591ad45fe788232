"""The steps that are timed by default."""

from __future__ import annotations

from collections.abc import Iterable

from attnmux.core import Platform, Request
from attnmux.testing.bench.linear_work import state_bytes
from attnmux.testing.bench.workload import Workload

GRID_CPU = (
    *((1, 256), (1, 2048), (1, 8192), (4, 512), (16, 256)),
    *((1, 128, 0), (2, 32, 256)),
)
VERIFY_CPU = ((1, 256), (4, 512))
GRID_ACCELERATOR = (
    *(
        (1, 1024),
        (1, 4096),
        (1, 32768),
        (1, 131072),
        (8, 4096),
        (32, 1024),
        (32, 4096),
        (32, 16384),
    ),
    *((128, 1024), (128, 4096), (256, 1024)),
    *((1, 2048, 0), (1, 8192, 0), (8, 1024, 0), (4, 512, 8192)),
)
VERIFY_ACCELERATOR = ((1, 4096), (16, 4096), (64, 4096))
"""(batch size, context) of decode, (batch size, new, prefix) of extend, and (batch size, prefix) of
verification."""

MEMORY_SHARE = 0.25
"""Share of the device's memory that two layers of a default workload may take. Backends allocate
too, and an engine may be running."""


def default_grid(request: Request, platform: Platform, itemsize: float) -> tuple[Workload, ...]:
    """Steps of typical sizes that fit the device's memory: decode, extend, and verification of
    chains where the request says of how many tokens. Of linear layers, whose states have one size
    in every context, one step for each batch size and number of new tokens.

    itemsize: bytes of a stored value.
    """
    on_cpu = platform.device_type == "cpu"
    sizes: Iterable[tuple[int, ...]] = GRID_CPU if on_cpu else GRID_ACCELERATOR
    room = platform.memory_bytes * MEMORY_SHARE or float("inf")
    grid = [
        Workload(phase="decode", batch_size=size[0], prefix=size[1] - 1)
        if len(size) == 2
        else Workload(phase="extend", batch_size=size[0], new=size[1], prefix=size[2])
        for size in sizes
    ]
    if request.spec_topk == 1 and request.spec_draft_tokens:
        new = request.spec_draft_tokens
        grid += [
            Workload(phase="verify", batch_size=batch_size, new=new, prefix=prefix)
            for batch_size, prefix in (VERIFY_CPU if on_cpu else VERIFY_ACCELERATOR)
        ]
    if request.is_linear:
        distinct: dict[tuple[str, int, int], Workload] = {}
        for each in grid:
            distinct.setdefault((each.phase, each.batch_size, each.new), each)

        def needed(each: Workload) -> int:
            copies = each.new if each.phase == "verify" else 0
            return (2 + copies) * state_bytes(each, request, itemsize)

        return tuple(each for each in distinct.values() if needed(each) <= room)
    return tuple(each for each in grid if 2 * each.stored_bytes(request, itemsize) <= room)
