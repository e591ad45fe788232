"""An indexer's part of a step where it picks blocks: its keys go to their pool, its picks to the
batch.

The score of a block for a token and a head is the largest product of the head's query with a key of
the block up to the token. The token's own block and those before it, `local_blocks` in all, are
always picked (MiniMax-M3).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attnmux.core.arguments import check_positive
from attnmux.core.batch import ForwardBatch
from attnmux.core.errors import InvalidInput
from attnmux.core.key_picks import SCORES_AT_ONCE, lens_of
from attnmux.core.kv.index_pool import IndexKPool

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
    """Of the indexer's queries, each with blocks of its own."""
    local_blocks: int = 1

    def __post_init__(self) -> None:
        for name in ("topk", "block_size", "heads"):
            check_positive(name, getattr(self, name))
        if not 0 <= self.local_blocks <= self.topk:
            expected = f"0 to {self.topk}, the blocks that are picked"
            raise InvalidInput("local_blocks", got=self.local_blocks, expected=expected)

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

        index_q: [T, heads, Di] and index_k: [T, Di], with their rotary parts applied. captured: as
        in `KeyPicker.pick`. Raises InvalidInput for a batch without room for picks.
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
        places, into = (each.view(len(rows), -1, *each.shape[1:]) for each in (positions, picks))
        size = self.block_size
        fits = KEYS_AT_ONCE // max(1, len(rows) * self.pool.head_dim) // size * size
        keys_at_once = max(size, min(fits, table.shape[1]))
        tokens_at_once = max(1, SCORES_AT_ONCE // (len(rows) * self.heads * keys_at_once))
        for start in range(0, q.shape[1], tokens_at_once):
            some = slice(start, start + tokens_at_once)
            scores = [
                block_scores(q[:, some], self.pool.keys(layer_id, slots), places[:, some] - n, size)
                for n, slots in zip(
                    range(0, table.shape[1], keys_at_once),
                    torch.split(table, keys_at_once, dim=1),
                    strict=True,
                )
            ]
            own = places[:, some] // size
            into[:, some] = best_blocks(torch.cat(scores, -1), own, self.topk, self.local_blocks)


def block_scores(
    index_q: torch.Tensor, index_k: torch.Tensor, positions: torch.Tensor, block_size: int
) -> torch.Tensor:
    """The largest product of each token's queries with a key of each block up to the token,
    [R, n, H, blocks] float32; -inf where there is none.

    index_q: [R, n, H, Di]. index_k: [R, S, Di], from the first key of a block on. positions: [R,
    n], each token's place among these keys; below 0 it is before them.
    """
    scores = torch.einsum("rthd,rsd->rths", index_q, index_k)
    key = torch.arange(index_k.shape[1], device=index_k.device)
    scores = scores.masked_fill(key > positions[..., None, None], -torch.inf)
    missing = -index_k.shape[1] % block_size
    padded = torch.nn.functional.pad(scores, (0, missing), value=-torch.inf)
    return padded.view(*padded.shape[:-1], -1, block_size).amax(-1)


def best_blocks(
    scores: torch.Tensor, own: torch.Tensor, topk: int, local_blocks: int
) -> torch.Tensor:
    """The blocks with the highest scores, [R, n, H, topk] int32, best first, followed by -1 where
    there are fewer.

    scores: [R, n, H, blocks]. own: [R, n], each token's own block, the last of `local_blocks` that
    come first.
    """
    block = torch.arange(scores.shape[-1], device=scores.device)
    own = own[..., None, None]
    is_local = (block <= own) & (block > own - local_blocks)
    best = scores.masked_fill(is_local, torch.inf).topk(min(topk, len(block)), dim=-1)
    picks = torch.where(best.values.isneginf(), -1, best.indices).int()
    return torch.nn.functional.pad(picks, (0, topk - picks.shape[-1]), value=-1)
