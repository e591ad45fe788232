"""How the kernels are launched, as data: tiles, warps and stages by architecture and width.

An entry serves every architecture that its key begins: "sm90" before "sm" before "". Entries of
whole families are what fits into their shared memory; none of them was measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from attnmux.triton.shapes import LEAST_WIDTH, Shape, next_power_of_2

Width = Literal["narrow", "wide", "latent"]
"""Of K and V, whichever is wider: up to 128 columns, up to 256, more."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class TileLaunch:
    """Of `attend_tiles`."""

    block_m: int
    """Rows of a tile: query heads of new tokens."""
    block_n: int
    """Keys of a block."""
    num_warps: int
    num_stages: int
    """Of the loop over blocks: the slots of a block are loaded half of them ahead of its keys."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShareLaunch:
    """Of `attend_shares`."""

    block_m: int
    """At most; fewer where a request has fewer rows."""
    block_n: int
    num_warps: int
    num_stages: int
    """As `TileLaunch.num_stages`."""
    programs_per_unit: int
    """Programs that a compute unit runs at a time."""
    least_share: int
    """Blocks that a program takes at least: below it, merging costs more than waiting."""
    parts: int
    """Partial results that are merged at a time."""


TILES: Mapping[tuple[str, Width], TileLaunch] = {
    ("", "narrow"): TileLaunch(block_m=64, block_n=64, num_warps=4, num_stages=2),
    ("", "wide"): TileLaunch(block_m=64, block_n=32, num_warps=4, num_stages=2),
    ("", "latent"): TileLaunch(block_m=32, block_n=16, num_warps=4, num_stages=2),
    ("sm", "narrow"): TileLaunch(block_m=128, block_n=64, num_warps=8, num_stages=3),
    ("sm", "wide"): TileLaunch(block_m=64, block_n=64, num_warps=8, num_stages=2),
    ("sm", "latent"): TileLaunch(block_m=64, block_n=16, num_warps=8, num_stages=2),
    ("sm90", "latent"): TileLaunch(block_m=64, block_n=32, num_warps=8, num_stages=2),
}

SHARES: Mapping[tuple[str, Width], ShareLaunch] = {
    ("", "narrow"): ShareLaunch(
        block_m=64,
        block_n=64,
        num_warps=4,
        num_stages=2,
        programs_per_unit=2,
        least_share=2,
        parts=8,
    ),
    ("", "wide"): ShareLaunch(
        block_m=32,
        block_n=32,
        num_warps=4,
        num_stages=2,
        programs_per_unit=2,
        least_share=4,
        parts=4,
    ),
    ("", "latent"): ShareLaunch(
        block_m=16,
        block_n=16,
        num_warps=4,
        num_stages=2,
        programs_per_unit=1,
        least_share=4,
        parts=1,
    ),
    ("sm", "narrow"): ShareLaunch(
        block_m=64,
        block_n=64,
        num_warps=4,
        num_stages=5,
        programs_per_unit=2,
        least_share=2,
        parts=8,
    ),
    ("sm", "wide"): ShareLaunch(
        block_m=64,
        block_n=32,
        num_warps=4,
        num_stages=3,
        programs_per_unit=2,
        least_share=2,
        parts=4,
    ),
    ("sm", "latent"): ShareLaunch(
        block_m=16,
        block_n=16,
        num_warps=4,
        num_stages=3,
        programs_per_unit=1,
        least_share=4,
        parts=1,
    ),
    ("sm90", "latent"): ShareLaunch(
        block_m=64,
        block_n=32,
        num_warps=8,
        num_stages=3,
        programs_per_unit=1,
        least_share=2,
        parts=1,
    ),
}


def tile_launch(shape: Shape, arch: str) -> TileLaunch:
    """For many new tokens."""
    return _closest(TILES, arch, width_of(shape))


def share_launch(shape: Shape, queries: int, arch: str) -> ShareLaunch:
    """For `queries` new tokens a request."""
    launch = _closest(SHARES, arch, width_of(shape))
    rows = max(next_power_of_2(queries * shape.group), LEAST_WIDTH)
    # What is merged at a time is held in registers.
    parts = max(launch.parts * LEAST_WIDTH // rows, 1)
    return replace(launch, block_m=min(rows, launch.block_m), parts=parts)


def width_of(shape: Shape) -> Width:
    widest = max(shape.d, shape.dv)
    if widest <= 128:
        return "narrow"
    return "wide" if widest <= 256 else "latent"


def _closest(table: Mapping[tuple[str, Width], T], arch: str, width: Width) -> T:
    """The entry whose key has most of the architecture's name."""
    begun = [name for name, of_width in table if of_width == width and arch.startswith(name)]
    return table[max(begun, key=len), width]
