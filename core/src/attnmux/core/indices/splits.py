"""How many parts the keys of a request are split into when parts are attended to in parallel."""

from __future__ import annotations

import torch

from attnmux.core.indices._segments import store
from attnmux.core.indices.args import check_lens
from attnmux.core.sizes import check_positive


def num_kv_splits(
    kv_lens: torch.Tensor,
    *,
    tile_size: int,
    max_splits: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """[B]: ceil(kv_len / tile_size), at least 1 and at most max_splits.

    Without max_splits a split is always one tile, whatever the batch around the request: that
    is what makes a result deterministic. A request without keys has one split, which
    writes its empty result.
    """
    check_lens("kv_lens", kv_lens)
    check_positive("tile_size", tile_size)
    if max_splits is not None:
        check_positive("max_splits", max_splits)
    splits = (kv_lens + (tile_size - 1)) // tile_size
    return store(splits.clamp_(min=1, max=max_splits), out, torch.int32)
