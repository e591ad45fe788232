"""Sparse attention: the keys that an indexer picks for each token, and their slots."""

from __future__ import annotations

import torch

from attnmux.core.arguments import check_lens, check_picks, check_positive, check_table
from attnmux.core.indices._segments import segment_of_place
from attnmux.core.indices.ragged import cu_seqlens


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
    num_tokens = check_table(req_to_token, rows)
    check_picks(topk_indices, num_tokens)
    places = (rows * req_to_token.shape[1]).unsqueeze(1) + topk_indices
    # For -1 this reads another slot, in bounds, which is not used
    return torch.where(topk_indices < 0, -1, req_to_token.view(-1)[places])


def index_scores(
    index_q: torch.Tensor, index_k: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Every key's score for every token, [..., T, S] float32.

    The score of key s for token t is the sum over the indexer's heads h of
    `weights[t, h] * relu(index_q[t, h] . index_k[s])` (DeepSeek-V3.2-Exp, equation 1), in float32.

    index_q: [..., T, Hi, Di], with its rotary part applied. index_k: [..., S, Di], of one sequence
    from its first token on. weights: [..., T, Hi], scales included. Leading dims are sequences, so
    that a decoding batch is [B, 1, Hi, Di] over keys [B, S, Di]. Memory: T * Hi * S scores.
    """
    scores = torch.einsum("...thd,...sd->...ths", index_q.float(), index_k.float()).relu_()
    return torch.einsum("...ths,...th->...ts", scores, weights.float())


def best_keys(scores: torch.Tensor, positions: torch.Tensor, topk: int) -> torch.Tensor:
    """The keys with the highest scores up to each token, [..., T, topk] int32, best first, followed
    by -1 where there are fewer.

    scores: [..., T, S]; those after a token's position may have any finite value. positions:
    [..., T], each token's place in its sequence: it sees keys up to it.
    Raises InvalidInput for a topk below 1.
    """
    check_positive("topk", topk)
    num_keys = scores.shape[-1]
    key = torch.arange(num_keys, device=scores.device)
    scores = scores.masked_fill(key > positions.unsqueeze(-1), -torch.inf)
    best = scores.topk(min(topk, num_keys), dim=-1)
    picks = torch.where(best.values.isneginf(), -1, best.indices).int()
    return torch.nn.functional.pad(picks, (0, topk - picks.shape[-1]), value=-1)
