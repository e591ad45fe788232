"""What the kernels answer, as the contract has it."""

from __future__ import annotations

import torch

from attnmux.core.layer import LayerSpec


def store_lse(source: torch.Tensor, lse: torch.Tensor, queries_each: int | None) -> None:
    """LSE of the kernels, a natural logarithm, to the caller's [T, Hq].

    source: [Hq, T], or [B, Hq, Tq] where every request has `queries_each` queries.
    """
    if queries_each is None:
        lse.copy_(source.t())
    else:
        lse.view(source.shape[0], queries_each, -1).copy_(source.transpose(1, 2))


def nothing(
    q: torch.Tensor, layer: LayerSpec, out: torch.Tensor | None, lse: torch.Tensor | None
) -> torch.Tensor:
    """The result of queries [T, Hq, D] that have no keys: zeros, and LSE -inf or the sinks."""
    if lse is not None:
        lse.fill_(-torch.inf)
        if layer.sinks is not None:
            lse.copy_(layer.sinks)
    if out is None:
        return q.new_zeros((*q.shape[:2], layer.v_head_dim))
    return out.zero_()
