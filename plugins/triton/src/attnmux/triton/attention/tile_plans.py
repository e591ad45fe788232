"""The plan of a step, made on the device: the rows of each tile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from attnmux.core import InvalidInput
from attnmux.triton.attention.step import TritonStep, batch_block
from attnmux.triton.kernels.tiles import plan_tiles
from attnmux.triton.launches.bound_kernel import BoundKernel, Launcher
from attnmux.triton.launches.shapes import next_power_of_2

TILES = 16
"""Tiles that one program plans."""
MOST_TILES = 65535
"""Tiles of a step: they lie along a grid's second axis, which CUDA limits to this many
(CUDA C++ Programming Guide, "Technical Specifications per Compute Capability")."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TileKey:
    """The key of a plan of tiles: layers with equal keys share a plan."""

    group: int
    """Query heads of a KV head."""
    block_m: int
    """Rows of a tile."""


class TilePlan:
    """The request and the first row of each tile. Its buffers grow with the steps."""

    def __init__(
        self, key: TileKey, device: torch.device, launcher: Launcher | None = None
    ) -> None:
        self.key = key
        self.num_tiles = 0
        self.request = torch.empty(0, dtype=torch.int32, device=device)
        self.row = torch.empty(0, dtype=torch.int32, device=device)
        self._outgrown: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Graphs that were captured before the buffers grew still write and read these."""
        self._launcher = launcher or Launcher()
        self._bound: dict[int, BoundKernel] = {}

    def fill(self, step: TritonStep) -> None:
        """For a step with `indptr["queries"]`. Raises InvalidInput for more tiles than a launch
        takes."""
        batch = step.batch
        self.fill_for(step.indptr["queries"], step.lens, batch.batch_size, batch.num_tokens)

    def fill_for(
        self, q_indptr: torch.Tensor, lens: torch.Tensor, batch_size: int, num_tokens: int
    ) -> None:
        """q_indptr: [B + 1] int32. lens: [B] int32, the tokens before the new ones. Raises as
        `fill`."""
        key = self.key
        # The last tile of each request may be partly empty, and so may that of padding's tokens.
        num_tiles = num_tokens * key.group // key.block_m + batch_size + 1
        if num_tiles > MOST_TILES:
            most = (MOST_TILES - batch_size - 1) * key.block_m // key.group
            raise InvalidInput(
                "num_tokens", got=f"{num_tokens} new tokens", expected=f"at most {most} a step"
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
            (q_indptr, lens, self.request, self.row),
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
            tensors=("q_indptr", "lens", "tile_request", "tile_row"),
            counts=("batch_size", "num_tokens", "num_tiles"),
            options={"num_warps": 4},
        )


Plans = Mapping[int, TilePlan]
"""By the height of their tiles."""
