"""What the kernels are told once a step: which tiles there are, and who takes which keys."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attnmux.core.errors import InvalidInput
from attnmux.triton.kernels.shares import STATE, plan_shares
from attnmux.triton.kernels.tiles import plan_tiles
from attnmux.triton.launch_types import ShareLaunch
from attnmux.triton.launching import BoundKernel, Launcher
from attnmux.triton.shapes import next_power_of_2
from attnmux.triton.step import Step

LEAST_BATCH = 256
"""Requests that a plan is compiled for at least: one variant for all batches up to it."""
SHARE_PROGRAMS = 16
"""Whose shares one program plans."""
TILES = 16
"""That one program plans."""
MOST_TILES = 65535
"""Of a step: tiles lie along a grid's second axis, which CUDA limits to this many
(CUDA C++ Programming Guide, "Technical Specifications per Compute Capability")."""


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
        launcher: Launcher | None = None,
    ) -> None:
        """units: compute units of the device. part_dtype: what partial results are kept in."""

        def made(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.key = key
        self._launcher = launcher or Launcher()
        self._bound: dict[tuple[int, int], BoundKernel] = {}
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
        batch, key = step.batch, self.key
        block_b = batch_block(batch.batch_size)
        bound = self._bound.get((step.lens_shift, block_b))
        if bound is None:
            bound = self._bind(step.lens_shift, block_b)
            self._bound[step.lens_shift, block_b] = bound
        bound(
            (-(-self.programs // SHARE_PROGRAMS), 1, 1),
            (
                step.lens,
                step.encoder_lens() if key.is_cross else None,
                None if key.has_own_table else batch.req_pool_indices,
            ),
            counts=(batch.batch_size,),
        )

    def _bind(self, lens_shift: int, block_b: int) -> BoundKernel:
        key, launch, splitting = self.key, self.key.launch, self.key.splitting
        return BoundKernel(
            self._launcher,
            plan_shares,
            {
                "stops": self.stops,
                "unit_blocks": self.unit_blocks,
                "starts": self.starts,
                "share": self.share,
                "num_programs": self.programs,
                "least_share": launch.least_share if splitting is None else 1,
                "items": key.items,
                "split_blocks": 1 if splitting is None else splitting.blocks,
                "max_splits": 1 if splitting is None else splitting.most,
                "LENS_SHIFT": lens_shift,
                "QUERIES": key.queries,
                "IS_CROSS": key.is_cross,
                "WINDOW": key.window,
                "CHUNK": key.chunk,
                "IS_FIXED": splitting is not None,
                "BLOCK_N": launch.block_n,
                "BLOCK_B": block_b,
                "PROGRAMS": SHARE_PROGRAMS,
                "MEETS_ENDS": launch.meets_ends and splitting is None,
            },
            tensors=("lens", "encoder_lens", "rows"),
            counts=("batch_size",),
            options={"num_warps": 4},
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TileKey:
    """Layers that one plan of tiles serves."""

    group: int
    block_m: int


class TilePlan:
    """Which request each tile of queries belongs to. Grows with the steps."""

    def __init__(
        self, key: TileKey, device: torch.device, launcher: Launcher | None = None
    ) -> None:
        self.key = key
        self.num_tiles = 0
        self.request = torch.empty(0, dtype=torch.int32, device=device)
        self.row = torch.empty(0, dtype=torch.int32, device=device)
        self._outgrown: list[tuple[torch.Tensor, torch.Tensor]] = []
        """What a graph that was captured earlier still writes and reads."""
        self._launcher = launcher or Launcher()
        self._bound: dict[int, BoundKernel] = {}

    def fill(self, q_indptr: torch.Tensor, batch_size: int, num_tokens: int) -> None:
        """q_indptr: [B + 1] int32.

        Raises InvalidInput for more tiles than a launch takes.
        """
        key = self.key
        # Each request's last tile may be part empty, and so may that of the tokens of none.
        num_tiles = num_tokens * key.group // key.block_m + batch_size + 1
        if num_tiles > MOST_TILES:
            most = (MOST_TILES - batch_size - 1) * key.block_m // key.group
            raise InvalidInput(
                "num_tokens", came=f"{num_tokens} new tokens", expected=f"at most {most} a step"
            )
        self.num_tiles = num_tiles
        if self.request.shape[0] < self.num_tiles:
            room = next_power_of_2(self.num_tiles)
            self._outgrown.append((self.request, self.row))
            self.request, self.row = self.request.new_empty(room), self.row.new_empty(room)
        block_b = batch_block(batch_size + 1)
        bound = self._bound.get(block_b)
        if bound is None:
            bound = self._bound[block_b] = self._bind(block_b)
        bound(
            (-(-self.num_tiles // TILES), 1, 1),
            (q_indptr, self.request, self.row),
            counts=(batch_size, num_tokens, self.num_tiles),
        )

    def _bind(self, block_b: int) -> BoundKernel:
        return BoundKernel(
            self._launcher,
            plan_tiles,
            {
                "GROUP": self.key.group,
                "BLOCK_M": self.key.block_m,
                "BLOCK_B": block_b,
                "TILES": TILES,
            },
            tensors=("q_indptr", "tile_request", "tile_row"),
            counts=("batch_size", "num_tokens", "num_tiles"),
            options={"num_warps": 4},
        )


def batch_block(count: int) -> int:
    """What a plan of `count` requests is compiled for."""
    return max(next_power_of_2(count), LEAST_BATCH)
