"""The score of a key for a token by an indexer, and the keys with the highest ones."""

from __future__ import annotations

import torch

from attnmux.core import InvalidInput


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
    by -1 if there are fewer.

    scores: [..., T, S]; those after a token's position may have any finite value. positions:
    [..., T], each token's place in its sequence: it sees keys up to it.
    Raises InvalidInput for a topk below 1.
    """
    InvalidInput.check_at_least(1, "topk", topk)
    num_keys = scores.shape[-1]
    key = torch.arange(num_keys, device=scores.device)
    scores = scores.masked_fill(key > positions.unsqueeze(-1), -torch.inf)
    best = scores.topk(min(topk, num_keys), dim=-1)
    picks = torch.where(best.values.isneginf(), -1, best.indices).int()
    return torch.nn.functional.pad(picks, (0, topk - picks.shape[-1]), value=-1)
