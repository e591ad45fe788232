"""Sparse attention: how a device scores an indexer's keys, and the slots of the picked ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attnmux.core.adapters.indices.ragged import cu_seqlens
from attnmux.core.adapters.indices.segments import segment_of_place
from attnmux.core.contract.arguments import check_lens, check_picks, check_table


def token_rows(
    req_pool_indices: torch.Tensor, extend_seq_lens: torch.Tensor, num_tokens: int
) -> torch.Tensor:
    """The row of the request table of each new token, [num_tokens] int64; 0 for tokens after those
    of all requests. Shapes are static, as device graphs require.

    req_pool_indices: [B] int64. extend_seq_lens: [B] int32.
    """
    check_lens("extend_seq_lens", extend_seq_lens, req_pool_indices.shape[0])
    rows = torch.cat([req_pool_indices, req_pool_indices.new_zeros(1)])
    return rows[segment_of_place(cu_seqlens(extend_seq_lens), num_tokens)]


def topk_slots(
    req_to_token: torch.Tensor, rows: torch.Tensor, topk_indices: torch.Tensor
) -> torch.Tensor:
    """Slots of the picked keys, [T, topk] int32; -1 for no key.

    rows: [T] int64, each token's row of the request table. topk_indices: [T, topk] int32, as on
    `ForwardBatch`. Shapes are static, as device graphs require.
    """
    check_picks(topk_indices, check_table(req_to_token, rows))
    places = (rows * req_to_token.shape[1]).unsqueeze(1) + topk_indices
    # For -1 this reads another slot, in bounds, which is not used
    return torch.where(topk_indices < 0, -1, req_to_token.view(-1)[places])


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class IndexRows:
    """A layer's keys as a pool stores them."""

    keys: torch.Tensor
    """[slots, index_head_dim]."""
    scales: torch.Tensor | None
    """[slots, blocks of 128 values] float32; None if keys are stored unchanged."""
