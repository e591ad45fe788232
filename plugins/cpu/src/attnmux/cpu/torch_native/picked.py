"""Latent layers over the keys that an indexer picked for each token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

VALUES_AT_ONCE = 2**22
"""Values of K that are gathered at once: 16 MiB of float32."""


def attend_picked(
    q: torch.Tensor, keys: torch.Tensor, places: torch.Tensor, *, rank: int, scaling: float
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """Attention of a few tokens after the other: their rows, out [t, Hq, rank], lse [t, Hq].

    q: [T, Hq, D]. keys: [n, D] of any dtype; their first `rank` columns are the values.
    places: [T, topk], rows of keys, -1 for none. Computed in float32; a token without keys has
    out 0 and lse -inf.
    """
    each = max(1, VALUES_AT_ONCE // max(1, places.shape[1] * keys.shape[1]))
    # 8-bit floats are gathered as bytes, which torch knows everywhere
    raw = keys.view(torch.uint8) if keys.itemsize == 1 else keys
    for start in range(0, len(q), each):
        rows = slice(start, start + each)
        hidden = places[rows] < 0
        picked = raw[places[rows].clamp(min=0)].view(keys.dtype).float()
        # Where a token has no key, what lies there may be no number
        picked = picked.masked_fill(hidden.unsqueeze(-1), 0)
        logits = torch.einsum("thd,tkd->thk", q[rows].float(), picked) * scaling
        logits = logits.masked_fill(hidden.unsqueeze(1), -torch.inf)
        lse = logits.logsumexp(-1)
        weights = torch.exp(logits - lse.masked_fill(lse.isneginf(), 0).unsqueeze(-1))
        yield rows, torch.einsum("thk,tkd->thd", weights, picked[..., :rank]), lse
