"""Rows over latents that the kernels made NaN, computed again in plain torch.

The kernels pad a request's last tile of latents with earlier content of the thread's memory, at
weight 0: NaN of another request makes a result NaN. Only such rows come here, and those of requests
that hold NaN themselves, so speed matters less than a path without that memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from attnmux.core.plugin import Keys

QUERIES = 32
"""Attended at once. With 128 heads over 8192 keys their float32 weights take 128 MiB."""


def replace_nan(
    q: torch.Tensor,
    out: torch.Tensor,
    latents: torch.Tensor,
    keys: Keys,
    bounds: torch.Tensor,
    scaling: float,
) -> None:
    """Compute the rows of `out` that hold NaN again, in place; causal from the end of the keys.

    q: [T, Hq, rank + rope]; out: [T, Hq, rank], without NaN in rows of no request.
    latents: [N, 1, rank + rope]; the table of `keys` names its rows.
    bounds: [B + 1] int32, where each request's queries begin.
    """
    # A sum is NaN where a number is, and takes no memory of the result's size.
    rows = out.flatten(1).sum(1, dtype=torch.float32).isnan().nonzero().flatten()
    owners = torch.bucketize(rows, bounds, right=True) - 1
    for owner in sorted(set(owners.tolist())):
        length = int(keys.lens[owner])
        own = latents[keys.page_table[owner, :length], 0].float()
        before = length - int(bounds[owner + 1])
        for some in torch.split(rows[owners == owner], QUERIES):
            out[some] = _attend(q[some].float(), own, some + before, scaling, out.shape[2])


def _attend(
    q: torch.Tensor, latents: torch.Tensor, last: torch.Tensor, scaling: float, rank: int
) -> torch.Tensor:
    """[n, Hq, rank] bfloat16. last: [n], the last key that each query sees."""
    scores = torch.einsum("qhd,kd->qhk", q, latents) * scaling
    hidden = torch.arange(len(latents), device=q.device) > last[:, None]
    weights = scores.masked_fill_(hidden[:, None], -torch.inf).softmax(-1)
    return torch.einsum("qhk,kd->qhd", weights, latents[:, :rank]).to(torch.bfloat16)
