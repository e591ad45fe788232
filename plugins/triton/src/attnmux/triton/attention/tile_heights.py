"""How tall a step's tiles are: tall ones read fewer keys, short ones fill the device's last round.

A device runs as many programs at a time as it has units. 176 tiles on 132 units take as long as 264
would; 256 tiles of two thirds of the height take less.
"""

from __future__ import annotations

import torch

FIXED_KEYS = 128
"""The fixed cost of a tile, in keys: it loads queries, fills rings and stores results."""
SHORT_COST = 1.12
"""The cost of a row in a tile of 128 rows compared with one of 192: between 1.05 and 1.08 on an
H200, see benchmarks/results/grid-h100.md."""
MOST_ROUNDS = 8
"""With more rounds, an empty part of the last one matters less than tall tiles save."""


def takes_short_tiles(
    new_lens: torch.Tensor,
    lens: torch.Tensor,
    *,
    tall: int,
    short: int,
    group: int,
    kv_heads: int,
    units: int,
    is_causal: bool = True,
    most_keys: int | None = None,
) -> bool:
    """Whether tiles of `short` rows end a step earlier than tiles of `tall` rows.

    new_lens, lens: [B] on the host, the new tokens and all keys of each request. tall, short: rows
    of a tile. group: query heads of a KV head. units: programs that the device runs at a time.
    most_keys: those that a token sees at most, if there is a window.
    """
    rows = new_lens.long() * group
    if int((rows // tall).sum()) * kv_heads > MOST_ROUNDS * units:
        return False

    def cost(height: int) -> float:
        keys = tile_keys(rows, lens.long(), height, group if is_causal else 0)
        if most_keys is not None:
            keys = keys.clamp(max=most_keys + height // group)
        return height * least_makespan(keys + FIXED_KEYS, kv_heads, units)

    return SHORT_COST * cost(short) < cost(tall)


def tile_keys(rows: torch.Tensor, lens: torch.Tensor, height: int, group: int) -> torch.Tensor:
    """[tiles] int64: the keys that each tile's last row sees.

    rows, lens: [B] int64, the rows and all keys of each request. group: rows of a token; 0 if
    every row sees all keys.
    """
    tiles = -(-rows // height)
    owner = torch.arange(len(rows)).repeat_interleave(tiles)
    if not group:
        return lens[owner]
    first = (tiles.cumsum(0) - tiles)[owner]
    stop = (torch.arange(len(owner)) - first + 1) * height
    unseen = (rows[owner] - stop).clamp(min=0) // group
    return lens[owner] - unseen


def least_makespan(work: torch.Tensor, copies: int, units: int) -> float:
    """A lower bound of the time in which `units` units do `copies` of each work.

    It is the exact time if all work is equal, and near that of the longest-first order: of the
    k * units + 1 longest, one unit does k + 1.
    """
    count = len(work) * copies
    if not count:
        return 0.0
    ordered = work.sort(descending=True).values
    rounds = (count - 1) // units
    last = torch.arange(rounds * units - rounds, rounds * units + 1) // copies
    return max(float(ordered[last].sum()), float(work.sum()) * copies / units)
