"""An indexer's part of a step: its keys go to their pool, and its picks to the batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from attnmux.core import ForwardBatch, InvalidInput
from attnmux.core.plugin import IndexRows, token_rows
from attnmux.transformers.model.sparse.index_pool import IndexKPool
from attnmux.transformers.model.sparse.scores import best_keys, index_scores

SCORES_AT_ONCE = 2**26
"""Scores of heads that are held at a time, 4 bytes each."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class KeyPicker:
    """Picks the keys that layers of kind "nsa" see, by scores in plain torch on any device, or by a
    kernel's if a plugin offers one for it (`shared_kernel("index_scores", context)`)."""

    pool: IndexKPool
    req_to_token: torch.Tensor
    """[rows, max_context] int32, the request table of the KV pool."""
    topk: int
    kernel: ScoresKeys | None = None

    def __post_init__(self) -> None:
        InvalidInput.check_at_least(1, "topk", self.topk)

    def room(self, batch: ForwardBatch) -> torch.Tensor:
        """A `ForwardBatch.topk_indices` for a step: [T, topk] int32, all -1."""
        shape = (batch.num_tokens, self.topk)
        return torch.full(shape, -1, dtype=torch.int32, device=self.req_to_token.device)

    def pick(
        self,
        layer_id: int,
        index_q: torch.Tensor,
        index_k: torch.Tensor,
        weights: torch.Tensor,
        batch: ForwardBatch,
        *,
        captured: bool = False,
    ) -> None:
        """Write the new tokens' keys to the pool, then `batch.topk_indices` in place.

        index_q: [T, Hi, Di] and index_k: [T, Di], with their rotary parts applied. weights:
        [T, Hi], scales included; see `index_scores` for the score. A token sees the keys of its own
        request up to its place; the drafts of a step are chains. captured: shapes are static, as
        device graphs require, so that every row of the table is scored whole; each request has as
        many new tokens as the others then. Otherwise lengths on the host are used, and read from
        the device if the batch has none.
        Raises InvalidInput for a batch without room for picks.
        """
        picks = batch.topk_indices
        if picks is None or picks.shape[1] != self.topk:
            got = None if picks is None else f"{picks.shape[1]} places a token"
            raise InvalidInput("topk_indices", got=got, expected=f"room for {self.topk}")
        index_q, index_k = self.pool.rotated(index_q), self.pool.rotated(index_k)
        self.pool.set_keys(layer_id, batch.out_cache_loc, index_k)
        if self.kernel is not None:
            self._pick_by_kernel(self.kernel, layer_id, index_q, weights, batch, picks, captured)
        elif captured:
            self._pick_alike(layer_id, index_q, weights, batch, self.req_to_token.shape[1])
        elif batch.forward_mode.is_decode_or_idle():
            lens = batch.seq_lens if batch.seq_lens_cpu is None else batch.seq_lens_cpu
            width = int(lens.max()) if lens.numel() else 0
            self._pick_alike(layer_id, index_q, weights, batch, width)
        else:
            self._pick_by_request(layer_id, index_q, weights, batch, picks)

    def _pick_by_kernel(
        self,
        kernel: ScoresKeys,
        layer_id: int,
        index_q: torch.Tensor,
        weights: torch.Tensor,
        batch: ForwardBatch,
        picks: torch.Tensor,
        captured: bool,
    ) -> None:
        num_tokens, width = len(index_q), self.req_to_token.shape[1]
        rows, lens = batch.req_pool_indices, batch.seq_lens_cpu
        if not captured and lens is not None and lens.numel():
            drafts = num_tokens // batch.batch_size if batch.forward_mode.is_target_verify() else 0
            width = min(width, int(lens.max()) + drafts)
        at_once = max(1, SCORES_AT_ONCE // max(1, width))
        if batch.extend_seq_lens is not None and not captured:
            rows = token_rows(rows, batch.extend_seq_lens, num_tokens)
        elif num_tokens > at_once:
            rows = rows.repeat_interleave(num_tokens // batch.batch_size)
        stored = self.pool.rows(layer_id)
        for start in range(0, num_tokens, at_once):
            some = slice(start, start + at_once)
            places = batch.positions[some]
            scores = torch.empty(
                (len(places), max(width, 1)), dtype=torch.float32, device=picks.device
            )
            of_rows = rows if num_tokens <= at_once else rows[some]
            kernel(index_q[some], weights[some], stored, self.req_to_token, of_rows, places, scores)
            picks[some] = best_keys(scores, places, self.topk)

    def _pick_by_request(
        self,
        layer_id: int,
        index_q: torch.Tensor,
        weights: torch.Tensor,
        batch: ForwardBatch,
        picks: torch.Tensor,
    ) -> None:
        first = 0
        for row, (prefix, new) in zip(batch.req_pool_indices, lens_of(batch), strict=True):
            num_keys = prefix + new
            # Not by `row` as a number, which would wait for the device
            slots = self.req_to_token.index_select(0, row)[0, :num_keys].long()
            keys = self.pool.keys(layer_id, slots)
            places = torch.arange(prefix, num_keys, device=keys.device)
            at_once = max(1, SCORES_AT_ONCE // max(1, index_q.shape[1] * num_keys))
            for start in range(0, new, at_once):
                some = slice(start, min(start + at_once, new))
                tokens = slice(first + some.start, first + some.stop)
                if num_keys > self.topk:
                    scores = index_scores(index_q[tokens], keys, weights[tokens])
                else:  # all are seen, whatever their scores
                    scores = keys.new_zeros(some.stop - some.start, num_keys)
                picks[tokens] = best_keys(scores, places[some], self.topk)
            first += new

    def _pick_alike(
        self,
        layer_id: int,
        index_q: torch.Tensor,
        weights: torch.Tensor,
        batch: ForwardBatch,
        width: int,
    ) -> None:
        """For requests with as many new tokens each, over the first `width` columns of a row."""
        requests, heads = batch.batch_size, index_q.shape[1]
        if not requests or batch.topk_indices is None:
            return
        slots = self.req_to_token[batch.req_pool_indices, :width].long()
        q = index_q.reshape(requests, -1, *index_q.shape[1:])
        w = weights.reshape(requests, -1, heads)
        at_once = max(1, SCORES_AT_ONCE // (index_q.shape[0] * heads))
        parts = [
            index_scores(q, self.pool.keys(layer_id, slots[:, start : start + at_once]), w)
            for start in range(0, width, at_once)
        ]
        places = batch.positions.view(requests, -1)
        picks = best_keys(torch.cat(parts, dim=-1), places, self.topk)
        batch.topk_indices.copy_(picks.view(-1, self.topk))


def lens_of(batch: ForwardBatch) -> list[tuple[int, int]]:
    """(cached, new) tokens of each request."""
    pairs = []
    for name in ("extend_prefix_lens", "extend_seq_lens"):
        mirror = getattr(batch, f"{name}_cpu")
        lens = getattr(batch, name) if mirror is None else mirror
        if lens is None:
            raise InvalidInput(name, got=None, expected="lengths in an extend step")
        pairs.append(lens.tolist())
    return list(zip(*pairs, strict=True))


class ScoresKeys(Protocol):
    """A device's own way to score keys."""

    def __call__(
        self,
        index_q: torch.Tensor,
        weights: torch.Tensor,
        stored: IndexRows,
        req_to_token: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        scores: torch.Tensor,
    ) -> None:
        """Write scores [T, S] float32 of the keys up to each token's place.

        The score of key s for token t is the sum over the indexer's heads h of
        `weights[t, h] * relu(index_q[t, h] . index_k[s])` (DeepSeek-V3.2-Exp, equation 1).

        index_q: [T, Hi, Di]. weights: [T, Hi]. rows: [R] int64, of the request table req_to_token;
        each is that of T / R tokens, one after another. positions: [T] int64, below S.
        Does not synchronise; shapes are static.
        """
