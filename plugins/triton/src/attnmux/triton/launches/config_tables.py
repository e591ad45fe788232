"""The tables of launch configurations: those of this version, and those tuned on this machine.

Entries without `measured` were not measured: they fit the shared memory and the registers of their
architectures, or repeat a measured neighbour.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from attnmux.core import FrozenMapping, InvalidInput
from attnmux.triton.launches.configs import (
    C,
    ConfigEntry,
    ConfigQuery,
    ShareConfig,
    TileConfig,
)
from attnmux.triton.launches.hopper_configs import (
    HOPPER_EIGHT_BITS,
    HOPPER_HALF_TILES,
    HOPPER_HELD_TILES,
    HOPPER_HIGH_EIGHT_BITS,
    HOPPER_HIGH_HELD_TILES,
    HOPPER_HIGH_TILES,
    HOPPER_LATENT_SHARES,
    HOPPER_LATENT_TILES,
    HOPPER_NARROW_HALF_TILES,
    HOPPER_NARROW_SHARES,
    HOPPER_PADDED_EIGHT_BITS,
    HOPPER_SHARES,
    HOPPER_TAIL_EIGHT_BITS,
    HOPPER_TILES,
    HOPPER_WIDE_EIGHT_BITS,
    HOPPER_WIDE_SHARES,
    HOPPER_WIDE_TILES,
)
from attnmux.triton.launches.shapes import LEAST_WIDTH
from attnmux.triton.launches.tuned_configs import KINDS, entry_of

if TYPE_CHECKING:
    from attnmux.core import TunedLaunch

H200 = "H200, triton 3.6.0"
H100 = "H100, triton 3.6.0"


def _tiles(block_m: int, block_n: int, num_warps: int, num_stages: int) -> TileConfig:
    return TileConfig(block_m=block_m, block_n=block_n, num_warps=num_warps, num_stages=num_stages)


SMALL = ("sm86", "sm89", "sm12")
"""NVIDIA's architectures with 99 KiB of shared memory a program."""

EIGHT_BITS_TILES = _tiles(128, 128, 8, 3)
NARROW_EIGHT_BITS_CHAINS = replace(_tiles(64, 128, 4, 3), programs_per_unit=2)
TILES: tuple[ConfigEntry[TileConfig], ...] = (
    ConfigEntry(width="narrow", config=_tiles(64, 64, 4, 2)),
    ConfigEntry(width="wide", config=_tiles(64, 32, 4, 2)),
    ConfigEntry(width="latent", config=_tiles(32, 16, 4, 2)),
    ConfigEntry(arch="sm", width="narrow", config=_tiles(128, 64, 8, 3)),
    ConfigEntry(arch="sm", width="wide", config=_tiles(64, 64, 8, 2)),
    ConfigEntry(arch="sm", width="wide", least_columns=513, config=_tiles(32, 32, 8, 2)),
    ConfigEntry(arch="sm", width="latent", config=_tiles(64, 16, 8, 2)),
    ConfigEntry(arch="sm90", width="latent", config=_tiles(64, 32, 8, 2)),
    ConfigEntry(arch="sm90", dims=(64, 64), config=HOPPER_HIGH_HELD_TILES, measured=H200),
    ConfigEntry(arch="sm90", dims=(80, 80), config=HOPPER_HIGH_HELD_TILES, measured=H200),
    ConfigEntry(arch="sm90", dims=(96, 96), config=HOPPER_HIGH_HELD_TILES, measured=H200),
    ConfigEntry(arch="sm90", dims=(112, 112), config=HOPPER_HIGH_HELD_TILES, measured=H200),
    ConfigEntry(arch="sm90", dims=(128, 128), config=HOPPER_HIGH_TILES, measured=H100),
    ConfigEntry(
        arch="sm90",
        dims=(128, 128),
        key_bits=8,
        config=EIGHT_BITS_TILES,
        measured=H200,
    ),
    # Of the kernel for Hopper, which serves keys of 8 bits only if queries are rounded to them.
    ConfigEntry(arch="sm90", dims=(64, 64), key_bits=8, config=HOPPER_HIGH_TILES, measured=H200),
    ConfigEntry(arch="sm90", dims=(128, 128), key_bits=8, config=HOPPER_HIGH_TILES, measured=H200),
    ConfigEntry(arch="sm90", dims=(192, 128), config=HOPPER_TILES, measured=H100),
    ConfigEntry(arch="sm90", dims=(256, 256), config=HOPPER_WIDE_TILES, measured=H100),
    ConfigEntry(arch="sm90", dims=(576, 512), config=HOPPER_LATENT_TILES, measured=H100),
    *(
        entry
        for arch in SMALL
        for entry in (
            ConfigEntry(arch=arch, width="narrow", least_columns=321, config=_tiles(64, 64, 8, 2)),
            ConfigEntry(arch=arch, width="wide", config=_tiles(64, 32, 8, 2)),
            ConfigEntry(arch=arch, width="wide", least_columns=513, config=_tiles(32, 32, 8, 2)),
        )
    ),
    # SM75 has 64 KiB, and no copies that run ahead.
    ConfigEntry(arch="sm7", width="narrow", config=_tiles(64, 32, 4, 1)),
    ConfigEntry(arch="sm7", width="narrow", least_columns=257, config=_tiles(32, 32, 4, 1)),
    ConfigEntry(arch="sm7", width="wide", config=_tiles(32, 32, 4, 1)),
    ConfigEntry(arch="sm7", width="wide", least_columns=513, config=_tiles(16, 16, 4, 1)),
    ConfigEntry(arch="sm7", width="latent", config=_tiles(16, 16, 4, 1)),
    # A thread has 256 registers and a warp 32 threads: tiles for half as many warps of 64 spill.
    ConfigEntry(arch="gfx12", width="narrow", config=_tiles(64, 32, 8, 2)),
    ConfigEntry(arch="gfx12", width="wide", config=_tiles(32, 32, 8, 2)),
    ConfigEntry(arch="gfx12", width="latent", config=_tiles(32, 16, 8, 1)),
)

SHORT_TILES: tuple[ConfigEntry[TileConfig], ...] = (
    ConfigEntry(arch="sm90", dims=(64, 64), config=HOPPER_HELD_TILES, measured=H200),
    ConfigEntry(arch="sm90", dims=(64, 64), key_bits=8, config=HOPPER_TILES),
    ConfigEntry(arch="sm90", dims=(80, 80), config=HOPPER_HELD_TILES, measured=H200),
    ConfigEntry(arch="sm90", dims=(96, 96), config=HOPPER_TILES),
    ConfigEntry(arch="sm90", dims=(112, 112), config=HOPPER_HELD_TILES, measured=H200),
    ConfigEntry(arch="sm90", dims=(128, 128), config=HOPPER_TILES, measured=H200),
)
"""Less tall than those of TILES, for steps of few tiles: see `tile_heights.py`."""

CHAINS: tuple[ConfigEntry[TileConfig], ...] = (
    *(
        ConfigEntry(
            arch="sm90", dims=dims, key_bits=bits, least_rows=rows, config=config, measured=measured
        )
        for bits, dims, rows, config, measured in (
            (16, (64, 64), 33, HOPPER_NARROW_HALF_TILES, H100),
            (16, (64, 64), 65, HOPPER_TILES, H100),
            (16, (80, 80), 33, HOPPER_TILES, H100),
            (16, (96, 96), 33, HOPPER_TILES, H100),
            (16, (112, 112), 33, HOPPER_TILES, H100),
            (16, (128, 128), 33, HOPPER_HALF_TILES, H100),
            (16, (128, 128), 65, HOPPER_TILES, H100),
            (16, (192, 128), 33, HOPPER_TILES, H100),
            (16, (256, 256), 33, HOPPER_WIDE_TILES, H100),
            (8, (64, 64), 33, NARROW_EIGHT_BITS_CHAINS, H100),
            (8, (80, 80), 33, NARROW_EIGHT_BITS_CHAINS, ""),
            (8, (80, 80), 49, NARROW_EIGHT_BITS_CHAINS, H100),
            (8, (96, 96), 33, NARROW_EIGHT_BITS_CHAINS, ""),
            (8, (96, 96), 49, NARROW_EIGHT_BITS_CHAINS, H100),
            (8, (112, 112), 33, NARROW_EIGHT_BITS_CHAINS, ""),
            (8, (112, 112), 49, NARROW_EIGHT_BITS_CHAINS, H100),
            (8, (128, 128), 33, NARROW_EIGHT_BITS_CHAINS, H100),
            (8, (128, 128), 65, EIGHT_BITS_TILES, H200),
            (8, (256, 256), 33, NARROW_EIGHT_BITS_CHAINS, H100),
            (8, (256, 256), 65, _tiles(128, 64, 8, 2), H100),
        )
    ),
)
"""Chains of drafts that are verified in tiles; `least_rows` counts query heads of a KV head times
new tokens of a request. Others are verified in shares."""

NARROW = ShareConfig(
    block_m=64,
    block_n=64,
    num_warps=4,
    num_stages=2,
    programs_per_unit=2,
    least_share=2,
    merged_rows=32,
)
WIDE = replace(NARROW, block_m=32, block_n=32, least_share=4, merged_rows=16)
LATENT = replace(WIDE, block_m=16, block_n=16, programs_per_unit=1)

FOUR_BITS = replace(
    NARROW,
    block_n=128,
    num_stages=3,
    programs_per_unit=3,
    options=FrozenMapping({"maxnreg": 168}),
)

SHARES: tuple[ConfigEntry[ShareConfig], ...] = (
    ConfigEntry(width="narrow", config=NARROW),
    ConfigEntry(width="wide", config=WIDE),
    ConfigEntry(width="latent", config=LATENT),
    ConfigEntry(arch="sm", width="narrow", config=replace(NARROW, num_stages=5)),
    ConfigEntry(
        arch="sm", width="wide", config=replace(WIDE, block_m=64, num_stages=3, least_share=2)
    ),
    ConfigEntry(arch="sm", width="latent", config=replace(LATENT, num_stages=3)),
    ConfigEntry(
        arch="sm90",
        width="latent",
        config=replace(LATENT, block_m=64, block_n=32, num_warps=8, num_stages=3, least_share=2),
    ),
    ConfigEntry(arch="sm90", dims=(128, 128), config=HOPPER_SHARES, measured=H200),
    ConfigEntry(arch="sm90", dims=(128, 128), key_bits=8, config=HOPPER_EIGHT_BITS, measured=H200),
    ConfigEntry(
        arch="sm90",
        dims=(128, 128),
        key_bits=8,
        least_rows=17,
        config=HOPPER_HIGH_EIGHT_BITS,
        measured=H200,
    ),
    # A key costs more instructions than its bytes cost time: blocks of 128 keys take 31 of a warp,
    # those of 64 take 37. 12 warps an SM then have the registers that the loop needs. Tiles of more
    # rows need more.
    ConfigEntry(arch="sm90", width="narrow", key_bits=4, config=FOUR_BITS),
    ConfigEntry(
        arch="sm90",
        width="narrow",
        key_bits=4,
        least_rows=LEAST_WIDTH + 1,
        config=replace(NARROW, num_stages=5),
    ),
    ConfigEntry(arch="sm90", dims=(64, 64), config=HOPPER_NARROW_SHARES, measured=H100),
    ConfigEntry(arch="sm90", dims=(64, 64), key_bits=8, config=HOPPER_EIGHT_BITS, measured=H100),
    *(
        entry
        for dims in ((80, 80), (96, 96), (112, 112))
        for entry in (
            ConfigEntry(arch="sm90", dims=dims, config=HOPPER_SHARES, measured=H100),
            ConfigEntry(
                arch="sm90", dims=dims, key_bits=8, config=HOPPER_PADDED_EIGHT_BITS, measured=H100
            ),
        )
    ),
    ConfigEntry(arch="sm90", dims=(192, 128), config=HOPPER_WIDE_SHARES, measured=H100),
    ConfigEntry(arch="sm90", dims=(256, 256), config=HOPPER_WIDE_SHARES, measured=H100),
    ConfigEntry(
        arch="sm90", dims=(192, 128), key_bits=8, config=HOPPER_TAIL_EIGHT_BITS, measured=H100
    ),
    ConfigEntry(
        arch="sm90", dims=(256, 256), key_bits=8, config=HOPPER_WIDE_EIGHT_BITS, measured=H100
    ),
    ConfigEntry(arch="sm90", dims=(576, 512), config=HOPPER_LATENT_SHARES, measured=H200),
    *(
        entry
        for arch in SMALL
        for entry in (
            ConfigEntry(
                arch=arch, width="narrow", least_columns=257, config=replace(NARROW, num_stages=3)
            ),
            ConfigEntry(arch=arch, width="wide", least_columns=513, config=WIDE),
        )
    ),
    ConfigEntry(
        arch="sm7",
        width="narrow",
        config=replace(NARROW, block_m=32, block_n=32, num_stages=1, least_share=4),
    ),
    ConfigEntry(arch="sm7", width="wide", config=replace(WIDE, block_m=16, num_stages=1)),
    ConfigEntry(arch="sm7", width="latent", config=replace(LATENT, num_stages=1)),
    # As in TILES.
    ConfigEntry(
        arch="gfx12",
        width="narrow",
        config=replace(NARROW, block_n=32, num_warps=8, least_share=4),
    ),
    ConfigEntry(arch="gfx12", width="wide", config=replace(WIDE, num_warps=8)),
    ConfigEntry(arch="gfx12", width="latent", config=replace(LATENT, num_warps=8, num_stages=1)),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigTables:
    """TILES, CHAINS and SHARES, and this machine's own entries, which win over them.

    An entry of CHAINS or SHARES for more rows wins over a tuned one for fewer: launches tuned for
    decode say nothing about drafts.
    """

    own_tiles: Sequence[ConfigEntry[TileConfig]] = ()
    own_shares: Sequence[ConfigEntry[ShareConfig]] = ()
    own_chains: Sequence[ConfigEntry[TileConfig]] = ()

    @classmethod
    def of(cls, tuned: Iterable[TunedLaunch], arch: str) -> ConfigTables:
        """The tables with the launches that were tuned on this machine. Leaves out, with a warning,
        those that no kernel here takes."""
        found: dict[str, list[ConfigEntry[Any]]] = {kind: [] for kind in KINDS}
        for launch in tuned:
            try:
                kind, entry = entry_of(launch, arch)
            except InvalidInput as error:
                warnings.warn(f"a tuned launch is left out: {error}", stacklevel=2)
            else:
                found[kind].append(entry)
        return cls(**{f"own_{kind}": tuple(entries) for kind, entries in found.items()})

    def tiles(self, query: ConfigQuery) -> TileConfig:
        """For many new tokens a request; `query.rows` counts the heads alone."""
        return _best(query, self.own_tiles) or _required(query, TILES)

    def chains(self, query: ConfigQuery) -> TileConfig | None:
        """For chains of drafts; None for those that are verified in shares."""
        return _best(query, (*CHAINS, *self.own_chains))

    def short_tiles(self, query: ConfigQuery) -> TileConfig | None:
        """Like `tiles`, but less tall."""
        return _best(query, SHORT_TILES)

    def shares(self, query: ConfigQuery) -> ShareConfig:
        """For few new tokens a request. A tile has no more rows than a request has."""
        return self.whole_shares(query).for_rows(query.rows)

    def whole_shares(self, query: ConfigQuery) -> ShareConfig:
        """Like `shares`, with the entry's rows of a tile."""
        return _required(query, (*SHARES, *self.own_shares))


def _best(query: ConfigQuery, entries: Sequence[ConfigEntry[C]]) -> C | None:
    """The most specific entry that fits; of two that are as specific, the later."""
    fitting = [entry for entry in reversed(entries) if entry.fits(query)]
    return max(fitting, key=lambda entry: entry.specificity).config if fitting else None


def _required(query: ConfigQuery, entries: Sequence[ConfigEntry[C]]) -> C:
    """The entries for any architecture cover every width."""
    config = _best(query, entries)
    if config is None:
        raise LookupError(f"no launch configuration for {query}")
    return config
