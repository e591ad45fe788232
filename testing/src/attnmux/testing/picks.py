"""What a model's indexer would write: keys for every token, picked at random."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attnmux.core.batch import ForwardBatch
from attnmux.testing.placement import Placed
from attnmux.testing.world import World

UNWRITTEN = 1 << 30
"""What the batch holds until the first layer's indexer wrote: no key of any request."""


def unwritten(world: World, num_tokens: int) -> torch.Tensor | None:
    """The batch's topk_indices before any layer; None where the case has no indexer."""
    topk = world.case.index_topk
    if not topk:
        return None
    shape = (num_tokens, topk)
    return torch.full(shape, UNWRITTEN, dtype=torch.int32, device=world.context.device)


def pick(
    world: World, requests: Sequence[Placed], batch: ForwardBatch, *, in_front: bool
) -> torch.Tensor:
    """[T, topk] int32: of the keys up to each token, as many as there is room for, out of order.

    Every fifth token gets one key less than it could have. in_front: the -1 follow the keys, else
    they lie between them. Rows of no request are -1.
    """
    topk = world.case.index_topk
    picks = torch.full((batch.num_tokens, topk), -1, dtype=torch.int32)
    token = 0
    for request in requests:
        # Keys that come with the call are all there are.
        cached = request.cached if world.case.save_kv_cache else 0
        for order in range(request.new):
            num_keys = cached + order + 1
            count = min(num_keys, topk)
            if token % 5 == 4 and count > 1:
                count -= 1
            keys = torch.randperm(num_keys, generator=world.generator)[:count].int()
            columns = torch.arange(count)
            if not in_front:
                columns = torch.randperm(topk, generator=world.generator)[:count]
            picks[token, columns] = keys
            token += 1
    return picks.to(world.context.device)
