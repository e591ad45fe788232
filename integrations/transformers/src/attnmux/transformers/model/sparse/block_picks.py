"""An indexer's part of a step if it picks blocks: its keys go to their pool, its picks to the
batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from attnmux.core import ForwardBatch, InvalidInput
from attnmux.transformers.model.sparse.block_ranking import RanksBlocks
from attnmux.transformers.model.sparse.index_pool import IndexKPool
from attnmux.transformers.model.sparse.key_picks import SCORES_AT_ONCE, lens_of

KEYS_AT_ONCE = 2**26
"""Values of an indexer's keys that are held at a time, 4 bytes each."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BlockPicker:
    """Picks the blocks that layers with `index_block_size` see, in plain torch on any device."""

    pool: IndexKPool
    req_to_token: torch.Tensor
    """[rows, max_context] int32, the request table of the KV pool."""
    topk: int
    """Blocks of each token and head."""
    block_size: int
    heads: int
    """Heads that get blocks."""
    rankings: Mapping[int, RanksBlocks]
    """By the layer's id."""

    def __post_init__(self) -> None:
        for name in ("topk", "block_size", "heads"):
            InvalidInput.check_at_least(1, name, getattr(self, name))
        for ranking in self.rankings.values():
            ranking.check(self.topk)

    def room(self, batch: ForwardBatch) -> torch.Tensor:
        """A `ForwardBatch.topk_indices` for a step: [T, heads, topk] int32, all -1."""
        shape = (batch.num_tokens, self.heads, self.topk)
        return torch.full(shape, -1, dtype=torch.int32, device=self.req_to_token.device)

    def pick(
        self,
        layer_id: int,
        index_q: torch.Tensor,
        index_k: torch.Tensor,
        batch: ForwardBatch,
        *,
        captured: bool = False,
    ) -> None:
        """Write the new tokens' keys to the pool, then `batch.topk_indices` in place.

        index_q: [T, Hi, Di], with its rotary part applied, and index_k: [T, width], as the ranking
        takes them; width is the pool's head_dim. captured: as in `KeyPicker.pick`.
        Raises InvalidInput for a batch without room for picks.
        """
        picks = batch.topk_indices
        if picks is None or picks.shape[1:] != (self.heads, self.topk):
            got = None if picks is None else f"{tuple(picks.shape[1:])} places a token"
            raise InvalidInput("topk_indices", got=got, expected=f"({self.heads}, {self.topk})")
        index_q, index_k = self.pool.rotated(index_q), self.pool.rotated(index_k)
        self.pool.set_keys(layer_id, batch.out_cache_loc, index_k)
        requests = batch.batch_size
        if not len(index_q):
            return
        if captured:
            self._pick_alike(layer_id, index_q, batch.req_pool_indices, batch.positions, picks)
        elif batch.forward_mode.is_decode_or_idle():
            lens = batch.seq_lens if batch.seq_lens_cpu is None else batch.seq_lens_cpu
            width, rows = int(lens.max()) if requests else 0, batch.req_pool_indices
            self._pick_alike(layer_id, index_q, rows, batch.positions, picks, width)
        else:
            first = 0
            for row, (prefix, new) in zip(batch.req_pool_indices, lens_of(batch), strict=True):
                some = slice(first, first + new)
                if new:
                    q, places = index_q[some], batch.positions[some]
                    self._pick_alike(layer_id, q, row[None], places, picks[some], prefix + new)
                first += new

    def _pick_alike(
        self,
        layer_id: int,
        index_q: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        picks: torch.Tensor,
        width: int | None = None,
    ) -> None:
        """For requests [R] with as many new tokens each, over the first `width` columns of a row;
        None: over all."""
        table = self.req_to_token[rows, :width].long()
        q = index_q.float().view(len(rows), -1, *index_q.shape[1:])
        places, into = (
            tensor.view(len(rows), -1, *tensor.shape[1:]) for tensor in (positions, picks)
        )
        size, ranking = self.block_size, self.rankings[layer_id]
        fits = KEYS_AT_ONCE // max(1, len(rows) * self.pool.head_dim) // size * size
        keys_at_once = max(size, min(fits, table.shape[1]))
        tokens_at_once = max(1, SCORES_AT_ONCE // (len(rows) * q.shape[2] * keys_at_once))
        for start in range(0, q.shape[1], tokens_at_once):
            some = slice(start, start + tokens_at_once)
            scores = [
                ranking.scores(
                    q[:, some], self.pool.keys(layer_id, slots), places[:, some] - n, size
                )
                for n, slots in zip(
                    range(0, table.shape[1], keys_at_once),
                    torch.split(table, keys_at_once, dim=1),
                    strict=True,
                )
            ]
            every = torch.cat(scores, -1)
            # Heads that share their blocks get copies
            into[:, some] = ranking.picks(every, places[:, some], size, self.topk)
