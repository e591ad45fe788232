"""The card's options: how a request's keys are split, and what the parts' results are kept in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import torch

from attnmux.core.errors import InvalidInput
from attnmux.triton.plans import Splitting

MOST_SPLITS = 32
"""Of a request whose splits must not depend on the batch: what bounds their partial results."""
SPLIT_TOKENS = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitOptions:
    """What decides whether a request's keys are split by its own length, and how."""

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
        """None: all keys in equal shares. block_n: keys of a block, of which splits are made."""
        if not (self.num_kv_splits or self.split_tile_size or self.deterministic):
            return None
        return Splitting(
            blocks=max((self.split_tile_size or SPLIT_TOKENS) // block_n, 1),
            most=self.num_kv_splits or MOST_SPLITS,
        )

    def part_dtype(self, splitting: Splitting | None, dtype: torch.dtype | None) -> torch.dtype:
        """dtype: Q's; None where nothing was decided."""
        in_fp32 = splitting is None or self.reduce_in_fp32
        return torch.float32 if in_fp32 or dtype is None else dtype


def _count(options: Mapping[str, object], name: str) -> int:
    count = cast("int", options.get(name, 0))
    if count < 0:
        raise InvalidInput(f"triton.{name}", came=count, expected="1 or more, or 0 for the default")
    return count
