"""Many items behind one prefix, as the paged kernels of fa2 want them.

Where a plan has them, token i of a sequence sees key j <= i if i or j lies in the prefix, or if
i < j + p for the place p that is given for i (`logits_mask_multi_item_scoring` in prefill.cuh). The
library counts p from 0 at a delimiter that its item does not see. In a batch the delimiter belongs
to the item that it opens, so every place is one more.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attnmux.core.batch import ForwardBatch, ForwardMode, MultiItem
from attnmux.core.errors import InvalidInput

LONGEST = (1 << 16) - 1
"""Tokens of an item: the library counts them in 16 bits."""


FEW_ROWS = 16
"""Rows of the smallest tile, which serves steps of no more a request."""

KEY_TILE = {True: 512, False: 128}
"""By whether a step has few rows a request, the most keys that a tile of them goes on by: 8 times
16 for one warp, or for each of four side by side (`get_num_warps_kv` in prefill.cuh)."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Items:
    """Arguments of `plan`, on the device."""

    prefix_lens: torch.Tensor
    """[B] uint32."""
    places: torch.Tensor
    """[B, width] uint16: of all tokens behind the prefix; of cached ones 0, which is not read."""
    longest: torch.Tensor
    """[B] uint16: the largest place. The kernel skips tiles of keys that lie further back, counted
    from the first token of its rows or the one after it: a place more than the largest distance.
    Never less than a tile: one that it skips to is loaded whole, also where it ends behind the
    keys, and NaN in V does not go away with a weight of 0."""


def lay_out(
    items: MultiItem, positions: torch.Tensor, q_lens: torch.Tensor, kv_lens: torch.Tensor
) -> Items:
    """positions: [T] int64. q_lens, kv_lens: [B] int32, host: new tokens and keys a request.

    It reads values on the host for sequences of 65536 tokens or more alone. Raises InvalidInput for
    an item that is too long for the library.
    """
    prefix_lens, width = items.prefix_lens, int(kv_lens.max())
    request = torch.repeat_interleave(q_lens).to(prefix_lens.device, non_blocking=True)
    column = positions[: len(request)] - prefix_lens[request]
    # A token of the prefix has no place: its value goes to a column that is not read.
    column = column.masked_fill(column < 0, width)
    places = torch.zeros(len(q_lens), width + 1, dtype=torch.int32, device=prefix_lens.device)
    places[request, column] = items.token_pos_in_items[: len(request)] + 1
    longest = places[:, :width].amax(1)
    if width > LONGEST and int(longest.max()) > LONGEST:
        raise InvalidInput(
            "multi_item.token_pos_in_items",
            came=f"an item of {int(longest.max())} tokens",
            expected=f"at most {LONGEST}, which flashinfer counts in 16 bits",
        )
    few_rows = len(request) <= FEW_ROWS * len(q_lens)
    return Items(
        prefix_lens=prefix_lens.to(torch.uint32),
        places=places.to(torch.uint16),
        longest=longest.clamp(min=KEY_TILE[few_rows]).to(torch.uint16),
    )


def check_items(batch: ForwardBatch) -> None:
    """Refuse many items where no kernel has a mask of them."""
    if batch.multi_item is None:
        return
    masked = batch.spec_info is not None and batch.spec_info.custom_mask is not None
    if masked or batch.forward_mode not in (ForwardMode.EXTEND, ForwardMode.MIXED):
        raise InvalidInput(
            "multi_item",
            came=f"many items in {batch.forward_mode.name}{' with a custom mask' * masked}",
            expected="None, or a step of EXTEND or MIXED without a custom mask",
        )
