"""How all keys of a batch are shared out to programs: the options, and a plan's buffers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import torch

from attnmux.core import InvalidInput
from attnmux.triton.attention.step import TritonStep, batch_block
from attnmux.triton.kernels.shares import STATE, plan_shares
from attnmux.triton.launches.bound_kernel import BoundKernel, Launcher
from attnmux.triton.launches.configs import ShareConfig

SHARE_PROGRAMS = 16
"""Programs whose shares one program plans."""
MOST_SPLITS = 32
"""Splits of a request that must not depend on the batch: this bounds the partial results."""
SPLIT_TOKENS = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Splitting:
    """How a request's keys are split by its own length, so that the batch does not matter."""

    blocks: int
    """Blocks of keys in a split."""
    most: int
    """Splits of a request; a longer request has longer splits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitOptions:
    """The card's options, which decide how keys are split and in which dtype parts are kept."""

    num_kv_splits: int
    split_tile_size: int
    reduce_in_fp32: bool
    deterministic: bool

    @classmethod
    def of(cls, options: Mapping[str, object], *, deterministic: bool) -> SplitOptions:
        """Raises InvalidInput for a number below 0."""
        return cls(
            num_kv_splits=_count(options, "num_kv_splits"),
            split_tile_size=_count(options, "split_tile_size"),
            reduce_in_fp32=bool(options.get("reduce_in_fp32", False)),
            deterministic=deterministic,
        )

    def splitting(self, block_n: int) -> Splitting | None:
        """None for equal shares of all keys. block_n: keys of a block."""
        if not (self.num_kv_splits or self.split_tile_size or self.deterministic):
            return None
        return Splitting(
            blocks=max((self.split_tile_size or SPLIT_TOKENS) // block_n, 1),
            most=self.num_kv_splits or MOST_SPLITS,
        )

    def part_dtype(self, splitting: Splitting | None, dtype: torch.dtype | None) -> torch.dtype:
        """The dtype of partial results. dtype: Q's; None if the request does not name one."""
        in_fp32 = splitting is None or self.reduce_in_fp32 or self.deterministic
        return torch.float32 if in_fp32 or dtype is None else dtype


def _count(options: Mapping[str, object], name: str) -> int:
    count = cast("int", options.get(name, 0))
    if count < 0:
        raise InvalidInput(f"triton.{name}", got=count, expected="1 or more, or 0 for the default")
    return count


@dataclass(frozen=True, kw_only=True, slots=True)
class ShareKey:
    """The key of a plan of shares: layers with equal keys share a plan."""

    queries: int
    is_cross: bool
    window: int
    chunk: int
    has_own_table: bool
    """Whether the keys are in a table of `SlotTables` and not in the request table's rows."""
    items: int
    """Tiles of rows times KV heads of a request."""
    config: ShareConfig
    splitting: Splitting | None
    """None: equal shares of all keys."""
    part_rows: int
    """Rows of a partial result: those of a tile without its padding."""
    part_width: int
    """Columns of a partial result."""


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
        """units: compute units of the device. part_dtype: as `SplitOptions.part_dtype`."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.key = key
        self._launcher = launcher or Launcher()
        self._bound: dict[tuple[int, int], BoundKernel] = {}
        self.sides = key.items if key.config.meets_ends and key.splitting is None else 1
        """Programs that take the same keys, each for an item of its own."""
        self._in_line = max(units * key.config.programs_per_unit // self.sides, 1)
        self.programs = self._in_line * self.sides
        # A program's first item and its last may be partial.
        places = 2 * self.programs
        if key.splitting is not None:
            places = max_batch_size * key.items * key.splitting.most
        self.buffers: Mapping[str, torch.Tensor] = {
            "stops": zeros(max_batch_size + 1),
            "unit_blocks": zeros(max_batch_size),
            "starts": zeros(self._in_line, STATE.value),
            "share": zeros(1),
            # Every launch leaves it at 0.
            "arrivals": zeros(max_batch_size * key.items),
            "span_arrivals": zeros(places),
            "partial": zeros(places, key.part_rows, key.part_width, dtype=part_dtype),
            "partial_lse": zeros(places, key.part_rows, dtype=torch.float32),
        }
        """By the kernels' names; their docstrings give the contents."""

    @property
    def most_parts(self) -> int:
        """The most parts of an item."""
        key = self.key
        if key.splitting is not None:
            return key.splitting.most
        # The items of a batch of one share all programs; an item may begin and end within one.
        most = self._in_line * self.sides // key.items + 2
        if key.window < 0:
            return most
        blocks = (key.window + key.queries) // key.config.block_n + 2
        return min(most, blocks // key.config.least_share + 2)

    def fill(self, step: TritonStep) -> None:
        batch, key = step.batch, self.key
        block_b = batch_block(batch.batch_size)
        bound = self._bound.get((step.lens_shift, block_b))
        if bound is None:
            bound = self._bind(step.lens_shift, block_b)
            self._bound[step.lens_shift, block_b] = bound
        bound(
            (-(-self._in_line // SHARE_PROGRAMS), 1, 1),
            (
                step.lens,
                step.encoder_lens() if key.is_cross else None,
                None if key.has_own_table else batch.req_pool_indices,
            ),
            counts=(batch.batch_size,),
        )

    def _bind(self, lens_shift: int, block_b: int) -> BoundKernel:
        key, config, splitting = self.key, self.key.config, self.key.splitting
        return BoundKernel(
            self._launcher,
            plan_shares,
            {
                **self.buffers,
                "num_programs": self._in_line,
                "least_share": config.least_share if splitting is None else 1,
                "items": key.items // self.sides,
                "split_blocks": 1 if splitting is None else splitting.blocks,
                "max_splits": 1 if splitting is None else splitting.most,
                "LENS_SHIFT": lens_shift,
                "QUERIES": key.queries,
                "IS_CROSS": key.is_cross,
                "WINDOW": key.window,
                "CHUNK": key.chunk,
                "IS_FIXED": splitting is not None,
                "BLOCK_N": config.block_n,
                "BLOCK_B": block_b,
                "PROGRAMS": SHARE_PROGRAMS,
                "MEETS_ENDS": config.meets_ends and splitting is None,
            },
            tensors=("lens", "encoder_lens", "rows"),
            counts=("batch_size",),
            options={"num_warps": 4},
        )
