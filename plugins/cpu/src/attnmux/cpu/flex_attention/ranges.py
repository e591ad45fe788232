"""Which keys each query sees, and so which blocks each tile reads.

A query's keys are a range of columns, less what an item or a mask hides. Columns count from
`Keys.start`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attnmux.core.errors import InvalidInput
from attnmux.cpu.flex_attention.tiles import bucket

if TYPE_CHECKING:
    from attnmux.core.batch import ForwardBatch
    from attnmux.cpu.flex_attention.keys import Keys
    from attnmux.cpu.flex_attention.tiles import Tiles
    from attnmux.cpu.steps import KeyRule, StepLens

LEAST_MASK = 1 << 16


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Ranges:
    """What the queries of N tiles see."""

    first: torch.Tensor
    """[N, size] int32: the first column in range."""
    end: torch.Tensor
    """[N, size] int32: one past the last; 0 for a query without keys."""
    hidden: tuple[torch.Tensor, torch.Tensor] | None
    """Hidden between two [N, size] int32: the end of the shared prefix, the own item's start."""
    mask: tuple[torch.Tensor, torch.Tensor] | None
    """The flat custom mask with room behind it, and [N, size] int64: where the query's column 0
    lies in it."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BlockLists:
    """The blocks of each tile, [N, w] int64, of which the first [N] int32 count."""

    partial: torch.Tensor
    num_partial: torch.Tensor
    whole: torch.Tensor | None
    """Those that every query of the tile sees all of; None: they are among the partial."""
    num_whole: torch.Tensor | None


def ranges(rule: KeyRule, batch: ForwardBatch, lens: StepLens, tiles: Tiles, keys: Keys) -> Ranges:
    """What each query sees under a rule.

    Raises InvalidInput for a custom mask that is not of the step's size.
    """
    cached = torch.zeros_like(lens.cached) if rule.in_call else lens.cached
    num_keys = lens.encoder if rule.is_cross else cached + lens.new
    # Where key 0 lies: behind the encoder's in the row, except among the call's own.
    base = -keys.start
    if not rule.is_cross and not rule.in_call:
        base = base + lens.encoder

    def of_tiles(values: torch.Tensor) -> torch.Tensor:
        return values[tiles.request].unsqueeze(1)

    position = of_tiles(cached) + tiles.order
    keep = None if batch.spec_info is None or rule.is_cross else batch.spec_info.custom_mask
    items = None if rule.is_cross else batch.multi_item
    num_seen = of_tiles(num_keys).expand_as(position)
    first, end = rule.bounds(position, num_seen, masked=keep is not None)
    base = of_tiles(base)
    sees = tiles.is_real & (end > first)
    hidden = mask = None
    if items is not None:
        item_start = position - items.token_pos_in_items[tiles.tokens]
        prefix_end = of_tiles(items.prefix_lens.long()).expand_as(position)
        hidden = (prefix_end + base).int(), (item_start + base).int()
    if keep is not None:
        rows = _mask_starts(keep, lens.new, num_keys)
        mask = _with_room(keep), of_tiles(rows) + tiles.order * of_tiles(num_keys) - base
    return Ranges(
        first=torch.where(sees, first + base, 0).int(),
        end=torch.where(sees, end + base, 0).int(),
        hidden=hidden,
        mask=mask,
    )


def block_lists(seen: Ranges, tiles: Tiles, keys: Keys, *, split: bool) -> BlockLists:
    """The blocks that hold a key of any query's range.

    split: list those apart that need no look at the mask.
    """
    block, width = keys.block, keys.table.shape[1]
    sees = seen.end > 0
    far = torch.iinfo(torch.int32).max
    low = torch.where(sees, seen.first, far).amin(1) // block
    high = (seen.end.amax(1) + block - 1) // block
    low = torch.minimum(low, high)
    table = keys.table[tiles.request]
    order = torch.arange(width, device=table.device)
    if not split or seen.hidden is not None or seen.mask is not None:
        listed = (low.unsqueeze(1) + order).clamp_(max=width - 1)
        return BlockLists(
            partial=table.gather(1, listed), num_partial=high - low, whole=None, num_whole=None
        )
    # A query that there is no token for may see anything; one without keys sees nothing whole.
    whole_from = (torch.where(tiles.is_real, seen.first, 0).amax(1) + block - 1) // block
    whole_to = torch.where(tiles.is_real, seen.end, far).amin(1) // block
    whole_from = torch.minimum(torch.maximum(whole_from, low), high)
    whole_to = torch.minimum(torch.maximum(whole_to, whole_from), high)
    num_before = (whole_from - low).unsqueeze(1)
    behind = whole_to.unsqueeze(1) + order - num_before
    listed = torch.where(order < num_before, low.unsqueeze(1) + order, behind)
    whole = (whole_from.unsqueeze(1) + order).clamp_(max=width - 1)
    return BlockLists(
        partial=table.gather(1, listed.clamp_(max=width - 1)),
        num_partial=high - low - (whole_to - whole_from),
        whole=table.gather(1, whole),
        num_whole=whole_to - whole_from,
    )


def _mask_starts(keep: torch.Tensor, new: torch.Tensor, num_keys: torch.Tensor) -> torch.Tensor:
    """[B] int64: where each request's part of the flat mask begins."""
    ends = (new * num_keys).cumsum(0)
    total = int(ends[-1]) if ends.numel() else 0
    if keep.dtype != torch.bool or keep.shape != (total,):
        raise InvalidInput(
            "custom_mask",
            came=f"{keep.dtype} of shape {tuple(keep.shape)}",
            expected=f"bool of shape ({total},), new tokens * keys of each request",
        )
    return ends - new * num_keys


def _with_room(keep: torch.Tensor) -> torch.Tensor:
    """The mask at the front of a larger one, since a size of its own would be compiled anew."""
    roomy = torch.zeros(bucket(keep.shape[0], LEAST_MASK), dtype=torch.bool, device=keep.device)
    roomy[: keep.shape[0]] = keep
    return roomy
