"""The mask of a draft tree as keys: each draft token is a request with one query.

The mask hides draft tokens only. Every draft token sees the whole prefix, so attention to the
prefix is another call, and `base` merges the results of both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnmux.core.plugin import KeyGroup, Keys
from attnmux.nvidia.listed_keys import listed

if TYPE_CHECKING:
    import torch

    from attnmux.core import BackendContext, ForwardBatch


def draft_keys(
    batch: ForwardBatch, visible: torch.Tensor, group: KeyGroup, context: BackendContext
) -> Keys:
    """The slots that each draft token sees among the drafts: a table [B·d, d] and lengths [B·d].

    visible: [B, d, d] bool, the drafts that each draft sees.
    """
    batch_size, count, _ = visible.shape
    slots = context.token_to_kv_pool.translate(batch.out_cache_loc, group.layer_id).int()
    table, lens = listed(slots.view(batch_size, 1, count).expand(-1, count, -1), visible)
    return Keys(page_table=table.flatten(0, 1), lens=lens.flatten())
