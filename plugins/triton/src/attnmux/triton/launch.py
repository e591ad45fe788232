"""How the kernels are launched: tiles, warps and stages by device and shape, as data."""

from __future__ import annotations

from dataclasses import dataclass

from attnmux.triton.shapes import LEAST_WIDTH, Shape, next_power_of_2


@dataclass(frozen=True, kw_only=True, slots=True)
class TileLaunch:
    """Of `attend_tiles`."""

    block_m: int
    """Rows of a tile: query heads of new tokens."""
    block_n: int
    """Keys of a block."""
    num_warps: int
    num_stages: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ShareLaunch:
    """Of `attend_shares`."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    programs_per_unit: int
    """Programs that a compute unit runs at a time."""
    least_share: int
    """Blocks that a program takes at least: below it, merging costs more than waiting."""
    parts: int
    """Partial results that are merged at a time."""


def tile_launch(shape: Shape) -> TileLaunch:
    """For many new tokens."""
    widest = max(shape.d, shape.dv)
    if widest > 256:
        return TileLaunch(block_m=64, block_n=32, num_warps=8, num_stages=2)
    if widest > 128:
        return TileLaunch(block_m=64, block_n=64, num_warps=4, num_stages=2)
    return TileLaunch(block_m=128, block_n=64, num_warps=4, num_stages=3)


def share_launch(shape: Shape, queries: int) -> ShareLaunch:
    """For `queries` new tokens a request."""
    rows = max(next_power_of_2(queries * shape.group), LEAST_WIDTH)
    widest = max(shape.d, shape.dv)
    if widest > 256:
        return ShareLaunch(
            block_m=min(rows, 64),
            block_n=32,
            num_warps=4 if rows <= LEAST_WIDTH else 8,
            num_stages=2,
            programs_per_unit=1,
            least_share=2,
            parts=1,
        )
    return ShareLaunch(
        block_m=min(rows, 64),
        block_n=64,
        num_warps=4,
        num_stages=3 if widest <= 128 else 2,
        programs_per_unit=2,
        least_share=2,
        parts=8 if rows <= LEAST_WIDTH else 1,
    )
