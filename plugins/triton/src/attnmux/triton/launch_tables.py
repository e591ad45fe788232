"""The launches that come with this version; `launch.py` says which of them counts.

Entries that name no machine were not measured: they are what fits into the shared memory of what
they speak of.
"""

from __future__ import annotations

from attnmux.triton.launch_types import Entry, ShareLaunch, TileLaunch

TILES: tuple[Entry[TileLaunch], ...] = (
    Entry(width="narrow", launch=TileLaunch(block_m=64, block_n=64, num_warps=4, num_stages=2)),
    Entry(width="wide", launch=TileLaunch(block_m=64, block_n=32, num_warps=4, num_stages=2)),
    Entry(width="latent", launch=TileLaunch(block_m=32, block_n=16, num_warps=4, num_stages=2)),
    Entry(
        arch="sm",
        width="narrow",
        launch=TileLaunch(block_m=128, block_n=64, num_warps=8, num_stages=3),
    ),
    Entry(
        arch="sm",
        width="wide",
        launch=TileLaunch(block_m=64, block_n=64, num_warps=8, num_stages=2),
    ),
    Entry(
        arch="sm",
        width="latent",
        launch=TileLaunch(block_m=64, block_n=16, num_warps=8, num_stages=2),
    ),
    Entry(
        arch="sm90",
        width="latent",
        launch=TileLaunch(block_m=64, block_n=32, num_warps=8, num_stages=2),
    ),
)

SHARES: tuple[Entry[ShareLaunch], ...] = (
    Entry(
        width="narrow",
        launch=ShareLaunch(
            block_m=64,
            block_n=64,
            num_warps=4,
            num_stages=2,
            programs_per_unit=2,
            least_share=2,
            parts=8,
        ),
    ),
    Entry(
        width="wide",
        launch=ShareLaunch(
            block_m=32,
            block_n=32,
            num_warps=4,
            num_stages=2,
            programs_per_unit=2,
            least_share=4,
            parts=4,
        ),
    ),
    Entry(
        width="latent",
        launch=ShareLaunch(
            block_m=16,
            block_n=16,
            num_warps=4,
            num_stages=2,
            programs_per_unit=1,
            least_share=4,
            parts=1,
        ),
    ),
    Entry(
        arch="sm",
        width="narrow",
        launch=ShareLaunch(
            block_m=64,
            block_n=64,
            num_warps=4,
            num_stages=5,
            programs_per_unit=2,
            least_share=2,
            parts=8,
        ),
    ),
    Entry(
        arch="sm",
        width="wide",
        launch=ShareLaunch(
            block_m=64,
            block_n=32,
            num_warps=4,
            num_stages=3,
            programs_per_unit=2,
            least_share=2,
            parts=4,
        ),
    ),
    Entry(
        arch="sm",
        width="latent",
        launch=ShareLaunch(
            block_m=16,
            block_n=16,
            num_warps=4,
            num_stages=3,
            programs_per_unit=1,
            least_share=4,
            parts=1,
        ),
    ),
    Entry(
        arch="sm90",
        width="latent",
        launch=ShareLaunch(
            block_m=64,
            block_n=32,
            num_warps=8,
            num_stages=3,
            programs_per_unit=1,
            least_share=2,
            parts=1,
        ),
    ),
)
