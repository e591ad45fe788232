"""Launch configurations of the kernels for Hopper GPUs.

`config_tables.py` says for which layers.
"""

from __future__ import annotations

from dataclasses import replace

from attnmux.core import FrozenMapping
from attnmux.triton.launches.configs import HOPPER, HOPPER_LATENT, ShareConfig, TileConfig

HOPPER_TILES = TileConfig(
    kernel=HOPPER,
    block_m=128,
    block_n=128,
    num_warps=4,
    num_stages=2,
    constants=FrozenMapping(
        {"COPY_WARPS": 4, "COPY_REGISTERS": 40, "REGISTERS": 232, "HOLDS_QUERIES": 0}
    ),
)
# Logits of 64 keys leave the registers for a third warpgroup.
HOPPER_HIGH_TILES = replace(
    HOPPER_TILES,
    block_m=192,
    block_n=64,
    constants=FrozenMapping(
        {"COPY_WARPS": 4, "COPY_REGISTERS": 40, "REGISTERS": 152, "HOLDS_QUERIES": 0}
    ),
)
# Of queries that are held in registers, matrix instructions read half as much shared memory.
HOPPER_HELD_TILES = replace(
    HOPPER_TILES, constants=FrozenMapping({**HOPPER_TILES.constants, "HOLDS_QUERIES": 1})
)
HOPPER_HIGH_HELD_TILES = replace(
    HOPPER_HIGH_TILES,
    constants=FrozenMapping(
        {"COPY_WARPS": 4, "COPY_REGISTERS": 32, "REGISTERS": 160, "HOLDS_QUERIES": 1}
    ),
)
HOPPER_HALF_TILES = replace(HOPPER_TILES, block_m=64, options=FrozenMapping({"maxnreg": 168}))
# Two programs fit an SM.
HOPPER_NARROW_HALF_TILES = replace(
    HOPPER_HALF_TILES, programs_per_unit=2, options=FrozenMapping({"maxnreg": 128})
)
HOPPER_WIDE_TILES = replace(HOPPER_TILES, block_n=64)
HOPPER_LATENT_TILES = TileConfig(
    kernel=HOPPER_LATENT,
    block_m=64,
    block_n=64,
    num_warps=4,
    num_stages=2,
    constants=FrozenMapping({"COPY_REGISTERS": 72, "REGISTERS": 216}),
)
HOPPER_SHARES = ShareConfig(
    kernel=HOPPER,
    # 64 rows of 128 columns spill at 128 registers
    block_m=32,
    least_block_m=8,
    block_n=64,
    num_warps=4,
    num_stages=4,
    programs_per_unit=2,
    least_share=4,
    merged_rows=32,
    # Two programs fit an SM; a launch's programs begin while those of the previous launch end.
    constants=FrozenMapping({"COPY_REGISTERS": 72}),
    options=FrozenMapping({"maxnreg": 128, "launch_pdl": True}),
)
HOPPER_EIGHT_BITS = replace(HOPPER_SHARES, block_m=16, block_n=128, num_stages=4, least_share=2)
HOPPER_HIGH_EIGHT_BITS = replace(HOPPER_EIGHT_BITS, block_m=32, block_n=64, num_stages=6)
# Rings of as many blocks leave no room for a second program.
HOPPER_WIDE_SHARES = replace(
    HOPPER_SHARES,
    programs_per_unit=1,
    least_share=2,
    merged_rows=16,
    constants=FrozenMapping({"COPY_REGISTERS": 120}),
    options=FrozenMapping({"maxnreg": 184, "launch_pdl": True}),
)
HOPPER_WIDE_EIGHT_BITS = replace(HOPPER_WIDE_SHARES, block_m=16, num_stages=6)
# With keys of two parts. The product with all keys of a block spills, and is yet faster.
HOPPER_TAIL_EIGHT_BITS = replace(
    HOPPER_WIDE_EIGHT_BITS,
    block_n=128,
    num_stages=4,
    options=FrozenMapping({"maxnreg": 240, "launch_pdl": True}),
)
# Rows of 64 columns and of 8 bits are half as many bytes.
HOPPER_NARROW_SHARES = replace(HOPPER_SHARES, block_n=128)
HOPPER_PADDED_EIGHT_BITS = replace(HOPPER_EIGHT_BITS, block_n=64, num_stages=6)
HOPPER_LATENT_SHARES = ShareConfig(
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
    constants=FrozenMapping({"COPY_REGISTERS": 72, "REGISTERS": 216}),
)
