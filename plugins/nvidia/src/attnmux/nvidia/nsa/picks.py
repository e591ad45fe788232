"""The keys of a call: rows of K [n, 1, 576] in bfloat16, and which of them each token sees."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from attnmux.nvidia.nsa.calls import TOPK_MULTIPLE
from attnmux.nvidia.pools import FP8

TOKENS_AT_ONCE = 64
"""Whose rows are widened together: of 2048 keys each that is 151 MB of bfloat16."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Picked:
    """What the kernel is told of a stretch of tokens."""

    tokens: slice | None
    """None: all."""
    kv: torch.Tensor
    """[n, 1, 576] bfloat16."""
    indices: torch.Tensor
    """[t, 1, topk] int32: rows of kv; -1 is no key."""


def picked(cache: torch.Tensor, places: torch.Tensor) -> Iterable[Picked]:
    """The whole step at once over rows of bfloat16. The kernel reads no others: of e4m3 the rows
    that were picked are widened, a stretch of tokens after the other.

    cache: [n, 1, 576]. places: [T, topk] int32, rows of the cache, -1 for none.
    """
    missing = -places.shape[1] % TOPK_MULTIPLE
    if missing:
        places = pad(places, (0, missing), value=-1)
    if cache.dtype != FP8:
        return (Picked(tokens=None, kv=cache, indices=places.unsqueeze(1)),)
    return _widened(cache, places)


def _widened(cache: torch.Tensor, places: torch.Tensor) -> Iterator[Picked]:
    for start in range(0, len(places), TOKENS_AT_ONCE):
        part = places[start : start + TOKENS_AT_ONCE]
        # As bytes: torch gathers no 8-bit floats everywhere
        rows = cache.view(torch.uint8)[part.clamp(min=0).flatten()].view(FP8)
        order = torch.arange(len(rows), dtype=torch.int32, device=part.device).view_as(part)
        yield Picked(
            tokens=slice(start, start + len(part)),
            kv=rows.bfloat16(),
            indices=torch.where(part < 0, -1, order).unsqueeze(1),
        )
