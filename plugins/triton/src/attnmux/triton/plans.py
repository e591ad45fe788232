"""What the kernels are told once a step: which tiles there are, and who takes which keys."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attnmux.triton.kernels.shares import STATE, plan_shares
from attnmux.triton.kernels.tiles import plan_tiles
from attnmux.triton.launch import ShareLaunch
from attnmux.triton.shapes import next_power_of_2
from attnmux.triton.step import Step


@dataclass(frozen=True, kw_only=True, slots=True)
class Splitting:
    """How a request's keys are split where the batch around it must not matter."""

    blocks: int
    """Of keys, in a split."""
    most: int
    """Splits of a request; a longer one has longer splits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShareKey:
    """Layers that one plan of shares serves."""

    queries: int
    is_cross: bool
    window: int
    chunk: int
    has_own_table: bool
    """Not the request table's rows, see `SlotTables`."""
    items: int
    """Tiles of rows times KV heads of a request."""
    launch: ShareLaunch
    splitting: Splitting | None
    """None: all keys in equal shares."""
    part_rows: int
    """Rows of a partial result: those of a tile that are not padding."""
    part_width: int
    """Its columns."""


class SharePlan:
    """Buffers that `plan_shares` writes and `attend_shares` reads, made once."""

    def __init__(
        self,
        key: ShareKey,
        max_batch_size: int,
        units: int,
        device: torch.device,
        *,
        part_dtype: torch.dtype,
    ) -> None:
        """units: compute units of the device. part_dtype: what partial results are kept in."""

        def made(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.key = key
        self.programs = max(units * key.launch.programs_per_unit, 1)
        self.stops, self.unit_blocks = made(max_batch_size + 1), made(max_batch_size)
        self.starts, self.share = made(self.programs, STATE.value), made(1)
        self.arrivals = made(max_batch_size * key.items)
        """Left at 0 by every launch."""
        # Of a share, the first item and the last may be partial.
        places = 2 * self.programs
        if key.splitting is not None:
            places = max_batch_size * key.items * key.splitting.most
        self.partial = made(places, key.part_rows, key.part_width, dtype=part_dtype)
        self.partial_lse = made(places, key.part_rows, dtype=torch.float32)
        """In units of log 2."""

    def fill(self, step: Step) -> None:
        key, launch, splitting = self.key, self.key.launch, self.key.splitting
        batch_size = step.batch.batch_size
        programs = 16
        plan_shares[(-(-self.programs // programs),)](
            step.lens,
            step.encoder_lens() if key.is_cross else None,
            None if key.has_own_table else step.batch.req_pool_indices,
            self.stops,
            self.unit_blocks,
            self.starts,
            self.share,
            batch_size,
            self.programs,
            launch.least_share if splitting is None else 1,
            key.items,
            1 if splitting is None else splitting.blocks,
            1 if splitting is None else splitting.most,
            LENS_SHIFT=step.lens_shift,
            QUERIES=key.queries,
            IS_CROSS=key.is_cross,
            WINDOW=key.window,
            CHUNK=key.chunk,
            IS_FIXED=splitting is not None,
            BLOCK_N=launch.block_n,
            BLOCK_B=next_power_of_2(max(batch_size, 1)),
            PROGRAMS=programs,
            num_warps=4,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TileKey:
    """Layers that one plan of tiles serves."""

    group: int
    block_m: int


class TilePlan:
    """Which request each tile of queries belongs to. Grows with the steps."""

    def __init__(self, key: TileKey, device: torch.device) -> None:
        self.key = key
        self.num_tiles = 0
        self.request = torch.empty(0, dtype=torch.int32, device=device)
        self.row = torch.empty(0, dtype=torch.int32, device=device)

    def fill(self, q_indptr: torch.Tensor, batch_size: int, num_tokens: int) -> None:
        """q_indptr: [B + 1] int32."""
        key = self.key
        # Each request's last tile may be part empty, and so may that of the tokens of none.
        self.num_tiles = num_tokens * key.group // key.block_m + batch_size + 1
        if self.request.shape[0] < self.num_tiles:
            room = next_power_of_2(self.num_tiles)
            self.request, self.row = self.request.new_empty(room), self.row.new_empty(room)
        tiles = 16
        plan_tiles[(-(-self.num_tiles // tiles),)](
            q_indptr,
            self.request,
            self.row,
            batch_size,
            num_tokens,
            self.num_tiles,
            GROUP=key.group,
            BLOCK_M=key.block_m,
            BLOCK_B=next_power_of_2(batch_size + 1),
            TILES=tiles,
            num_warps=4,
        )
