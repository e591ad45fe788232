"""Multi-item scoring (`--enable-mis`): many items after a shared prefix, each blind to the rest."""

from __future__ import annotations

from typing import Any

import torch

from attnmux.core import InvalidInput, MultiItem


def items_of(
    theirs: Any,  # noqa: ANN401  # SGLang's ForwardBatch
    new_lens: torch.Tensor | None,
    prefix_lens: torch.Tensor | None,
) -> MultiItem | None:
    """The items of a step, None if SGLang scores none.

    theirs: SGLang has for each request the places of its delimiters among its new tokens, on the
    host, and leaves the positions of the items to the attention backend: a delimiter takes the last
    position of the prefix, and its item follows. They are written to `theirs.positions`.
    new_lens, prefix_lens: [B] int32 on the host. Raises InvalidInput without them.
    """
    delimiters = getattr(theirs, "multi_item_delimiter_indices", None)
    if delimiters is None:
        return None
    if new_lens is None or prefix_lens is None:
        expected = "lengths on the host, by which the items are found"
        raise InvalidInput("seq_lens_cpu", got=None, expected=expected)
    shared, places, positions = [], [], []
    lens = zip(new_lens.tolist(), prefix_lens.tolist(), strict=True)
    for starts, (new, cached) in zip(delimiters, lens, strict=True):
        first = int(starts[0]) if len(starts) else new
        tokens = torch.arange(new)
        place = tokens.clone()
        if len(starts):
            item = torch.searchsorted(starts, tokens, right=True) - 1
            place = torch.where(item < 0, tokens, tokens - starts[item.clamp(min=0)])
        of_item = tokens >= first
        shared.append(cached + first)
        places.append(place.masked_fill(~of_item, 0))
        positions.append(cached + torch.where(of_item, first + place - 1, tokens))
    rows, device = torch.cat(positions), theirs.positions.device
    theirs.positions[: len(rows)].copy_(rows)
    return MultiItem(
        prefix_lens=torch.tensor(shared, dtype=torch.int32).to(device, non_blocking=True),
        token_pos_in_items=torch.cat(places).int().to(device, non_blocking=True),
    )
