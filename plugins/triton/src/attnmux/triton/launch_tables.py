"""The launches that come with this version; `launch.py` says which of them counts.

Entries that name no machine were not measured: they are what fits into the shared memory of what
they speak of, or a measured neighbour's launch.
"""

from __future__ import annotations

from dataclasses import replace

from attnmux.core.choosing.frozen import FrozenMapping
from attnmux.triton.launch_types import HOPPER, HOPPER_LATENT, Entry, ShareLaunch, TileLaunch

H200 = "H200, triton 3.6.0"

HOPPER_TILES = TileLaunch(
    kernel=HOPPER,
    block_m=128,
    block_n=128,
    num_warps=4,
    num_stages=2,
    more=FrozenMapping({"COPY_WARPS": 4, "COPY_REGISTERS": 40, "REGISTERS": 232}),
)
HOPPER_SHARES = ShareLaunch(
    kernel=HOPPER,
    block_m=64,
    least_block_m=8,
    block_n=64,
    num_warps=4,
    num_stages=4,
    programs_per_unit=2,
    least_share=4,
    merged_rows=32,
    # Two programs fit a processor; a launch's begin while those of the one before it end.
    options=FrozenMapping({"maxnreg": 128, "launch_pdl": True}),
)
HOPPER_EIGHT_BITS = replace(HOPPER_SHARES, block_n=128, num_stages=6, least_share=2)
HOPPER_LATENT_SHARES = ShareLaunch(
    kernel=HOPPER_LATENT,
    block_m=64,
    least_block_m=64,
    block_n=64,
    num_warps=4,
    num_stages=2,
    programs_per_unit=1,
    least_share=2,
    merged_rows=64,
    meets_ends=True,
    more=FrozenMapping({"COPY_REGISTERS": 72, "REGISTERS": 216}),
)

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
    Entry(arch="sm90", dims=(128, 128), launch=HOPPER_TILES, measured=H200),
    # As for 128 columns, not measured.
    Entry(arch="sm90", dims=(64, 64), launch=HOPPER_TILES),
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
            merged_rows=32,
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
            merged_rows=16,
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
            merged_rows=16,
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
            merged_rows=32,
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
            merged_rows=16,
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
            merged_rows=16,
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
            merged_rows=16,
        ),
    ),
    Entry(arch="sm90", dims=(128, 128), launch=HOPPER_SHARES, measured=H200),
    Entry(arch="sm90", dims=(128, 128), key_bits=8, launch=HOPPER_EIGHT_BITS, measured=H200),
    # As for 128 columns, not measured.
    Entry(arch="sm90", dims=(64, 64), launch=HOPPER_SHARES),
    Entry(arch="sm90", dims=(64, 64), key_bits=8, launch=HOPPER_EIGHT_BITS),
    Entry(arch="sm90", dims=(576, 512), launch=HOPPER_LATENT_SHARES, measured=H200),
)
