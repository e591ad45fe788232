"""Head counts that the causal kernels get right.

Rows of Q are all heads of a token, token by token, and a tile is 64 or 128 of them. To find the
last 64 keys that a tile sees, the causal kernels divide the tile's end by the head count, rounding
down (`kv_tile_idx` in mla.cuh and mla_hopper.cuh of 0.6.13; `MLAPlan` rounds up). Where a tile ends
within a token and its keys end on a multiple of 64, that token's own key is left out. So heads are
padded until tiles end where tokens do.
"""

from __future__ import annotations

import torch

MOST = 128
"""Rows of the largest tile: more heads than these end in no tile of their own."""


def padded_heads(num_heads: int) -> int:
    """The heads that a causal plan is made for: the next power of 2, up to `MOST`."""
    return 1 << (num_heads - 1).bit_length()


def padded(q: torch.Tensor, num_heads: int) -> torch.Tensor:
    """q [T, H, D] as [T, num_heads, D], with zeros for heads that are not there."""
    result = q.new_zeros((q.shape[0], num_heads, q.shape[2]))
    result[:, : q.shape[1]].copy_(q)
    return result
