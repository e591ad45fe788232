"""What the kernels answer, as the contract has it."""

from __future__ import annotations

import torch

from attnmux.core.layer import LayerSpec
from attnmux.nvidia.rows import store_lse as store_lse


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
