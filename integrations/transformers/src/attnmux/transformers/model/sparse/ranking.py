"""Which keys or blocks are the best for a token: what the indexers of models differ in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from attnmux.core import InvalidInput


class RanksBlocks(Protocol):
    """How an indexer scores and picks blocks."""

    def check(self, topk: int) -> None:
        """Raise InvalidInput for so few picks."""

    def scores(
        self, index_q: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, block_size: int
    ) -> torch.Tensor:
        """[R, n, H, blocks] float32; -inf for blocks that a token does not see.

        index_q: [R, n, Hi, Di] float32. rows: [R, S, width] float32, the indexer's rows of the
        tokens from the first of a block on. positions: [R, n], each token's place among these rows;
        below 0 it is before them.
        """

    def picks(
        self, scores: torch.Tensor, positions: torch.Tensor, block_size: int, topk: int
    ) -> torch.Tensor:
        """[R, n, H, topk] int32, followed by -1 if there are fewer.

        scores: of all blocks of the request. positions: [R, n], each token's place in it.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class BestProducts:
    """The score of a block for a token and a head is the largest product of the head's query with a
    key of the block up to the token. The token's own block and those before it, `local_blocks` in
    all, are always picked (MiniMax-M3)."""

    local_blocks: int = 1

    def check(self, topk: int) -> None:
        if not 0 <= self.local_blocks <= topk:
            expected = f"0 to {topk}, the blocks that are picked"
            raise InvalidInput("local_blocks", got=self.local_blocks, expected=expected)

    def scores(
        self, index_q: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, block_size: int
    ) -> torch.Tensor:
        scores = torch.einsum("rthd,rsd->rths", index_q, rows)
        key = torch.arange(rows.shape[1], device=rows.device)
        scores = scores.masked_fill(key > positions[..., None, None], -torch.inf)
        missing = -rows.shape[1] % block_size
        padded = torch.nn.functional.pad(scores, (0, missing), value=-torch.inf)
        return padded.view(*padded.shape[:-1], -1, block_size).amax(-1)

    def picks(
        self, scores: torch.Tensor, positions: torch.Tensor, block_size: int, topk: int
    ) -> torch.Tensor:
        block = torch.arange(scores.shape[-1], device=scores.device)
        own_block = (positions // block_size)[..., None, None]
        is_local = (block <= own_block) & (block > own_block - self.local_blocks)
        return _best(scores.masked_fill(is_local, torch.inf), topk)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class KeysOfBlocks:
    """A whole block has one key, made of what is kept of its tokens. Its score for a token is the
    sum of the positive products of that key with the token's queries. A token sees the best of the
    blocks that are whole up to itself, and the begun block that it is in: one of the picks is kept
    for that. All heads have the same blocks (Qwen4-Exp)."""

    make: Callable[[torch.Tensor], torch.Tensor]
    """Rows [R, blocks, block_size, width] float32 to keys [R, blocks, Di]."""

    def check(self, topk: int) -> None:
        if topk < 2:
            raise InvalidInput("topk", got=topk, expected="2 or more: one is for a begun block")

    def scores(
        self, index_q: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, block_size: int
    ) -> torch.Tensor:
        num_blocks = rows.shape[1] // block_size
        whole = rows[:, : num_blocks * block_size]
        whole = whole.reshape(len(rows), num_blocks, block_size, rows.shape[2])
        keys = self.make(whole).float()
        scores = torch.einsum("rthd,rbd->rthb", index_q, keys).relu().sum(2, keepdim=True)
        last = (torch.arange(num_blocks, device=rows.device) + 1) * block_size - 1
        return scores.masked_fill(last > positions[..., None, None], -torch.inf)

    def picks(
        self, scores: torch.Tensor, positions: torch.Tensor, block_size: int, topk: int
    ) -> torch.Tensor:
        is_whole = (positions + 1) % block_size == 0
        begun = torch.where(is_whole, -1, positions // block_size).int()[..., None, None]
        picks = torch.cat([begun.expand(*scores.shape[:-1], 1), _best(scores, topk - 1)], dim=-1)
        return picks.sort(dim=-1, descending=True).values


def _best(scores: torch.Tensor, topk: int) -> torch.Tensor:
    """The places of the highest scores, [..., topk] int32, best first, followed by -1 if there are
    fewer. scores: [..., places]."""
    best = scores.topk(min(topk, scores.shape[-1]), dim=-1)
    picks = torch.where(best.values.isneginf(), -1, best.indices).int()
    return torch.nn.functional.pad(picks, (0, topk - picks.shape[-1]), value=-1)


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
    key = torch.arange(scores.shape[-1], device=scores.device)
    scores = scores.masked_fill(key > positions.unsqueeze(-1), -torch.inf)
    return _best(scores, topk)
