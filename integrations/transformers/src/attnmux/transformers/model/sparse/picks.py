"""An indexer's part of a step: its keys go to their pool, and its picks to the batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch

from attnmux.core import ForwardBatch, InvalidInput
from attnmux.core.plugin import IndexRows, token_rows
from attnmux.transformers.model.sparse.index_pool import IndexKPool
from attnmux.transformers.model.sparse.ranking import RanksBlocks, best_keys, index_scores

SCORES_AT_ONCE = 2**26
"""Scores of heads that are held at a time, 4 bytes each."""

KEYS_AT_ONCE = 2**26
"""Values of an indexer's keys of blocks that are held at a time, 4 bytes each."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Picker:
    """The part that indexers of keys and of blocks share."""

    pool: IndexKPool
    req_to_token: torch.Tensor
    """[rows, max_context] int32, the request table of the KV pool."""
    topk: int
    """Keys of each token, or blocks of each token and head."""

    @property
    def places(self) -> tuple[int, ...]:
        """Places of each token in `ForwardBatch.topk_indices`."""
        return (self.topk,)

    def room(self, batch: ForwardBatch) -> torch.Tensor:
        """A `ForwardBatch.topk_indices` for a step: [T, *places] int32, all -1."""
        shape = (batch.num_tokens, *self.places)
        return torch.full(shape, -1, dtype=torch.int32, device=self.req_to_token.device)

    def _begin(
        self, layer_id: int, index_q: torch.Tensor, index_k: torch.Tensor, batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new tokens' keys to the pool. Returns queries as they are multiplied, and the
        batch's room for picks.

        Raises InvalidInput for a batch without.
        """
        picks = batch.topk_indices
        if picks is None or tuple(picks.shape[1:]) != self.places:
            got = None if picks is None else f"{_listed(picks.shape[1:])} places a token"
            expected = f"room for {_listed(self.places)}"
            raise InvalidInput("topk_indices", got=got, expected=expected)
        self.pool.set_keys(layer_id, batch.out_cache_loc, self.pool.rotated(index_k))
        return self.pool.rotated(index_q), picks

    def _parts(
        self, batch: ForwardBatch, *, captured: bool
    ) -> Iterator[tuple[torch.Tensor, slice, int | None]]:
        """Parts of a step whose requests have as many new tokens each: rows of the table [R], the
        tokens, and the columns of a row that hold keys; None: all.

        captured: shapes are static, as device graphs require. Otherwise lengths on the host are
        used, and read from the device if the batch has none.
        """
        if not batch.num_tokens:
            return
        if captured:
            yield batch.req_pool_indices, slice(None), None
        elif batch.forward_mode.is_decode_or_idle():
            lens = batch.seq_lens if batch.seq_lens_cpu is None else batch.seq_lens_cpu
            yield batch.req_pool_indices, slice(None), int(lens.max())
        else:
            spans = lens_of(batch)
            for row, span, tokens in zip(
                batch.req_pool_indices, spans, token_slices(spans), strict=True
            ):
                if tokens.stop > tokens.start:
                    yield row[None], tokens, sum(span)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class KeyPicker(_Picker):
    """Picks the keys that layers of kind "nsa" see, by scores in plain torch on any device, or by a
    kernel's if a plugin offers one for it (`shared_kernel("index_scores", context)`)."""

    kernel: ScoresKeys | None = None

    def __post_init__(self) -> None:
        InvalidInput.check_at_least(1, "topk", self.topk)

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
        index_q, picks = self._begin(layer_id, index_q, index_k, batch)
        if self.kernel is not None:
            self._pick_by_kernel(self.kernel, layer_id, index_q, weights, batch, picks, captured)
            return
        for rows, tokens, width in self._parts(batch, captured=captured):
            slots = self.req_to_token[rows, :width].long()
            queries = index_q[tokens], weights[tokens]
            pick_keys(self.pool, layer_id, *queries, slots, batch.positions[tokens], picks[tokens])

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


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BlockPicker(_Picker):
    """Picks the blocks that layers with `index_block_size` see, in plain torch on any device."""

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

    @property
    def places(self) -> tuple[int, ...]:
        return self.heads, self.topk

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
        index_q, picks = self._begin(layer_id, index_q, index_k, batch)
        for rows, tokens, width in self._parts(batch, captured=captured):
            slots = self.req_to_token[rows, :width].long()
            q, places = index_q[tokens].float(), batch.positions[tokens]
            self._pick_alike(layer_id, q, slots, places, picks[tokens])

    def _pick_alike(
        self,
        layer_id: int,
        index_q: torch.Tensor,
        table: torch.Tensor,
        positions: torch.Tensor,
        picks: torch.Tensor,
    ) -> None:
        """For requests with as many new tokens each, whose keys are in slots [R, S] of a table."""
        q, places, into = (
            tensor.view(len(table), -1, *tensor.shape[1:]) for tensor in (index_q, positions, picks)
        )
        size, ranking = self.block_size, self.rankings[layer_id]
        fits = KEYS_AT_ONCE // (len(table) * self.pool.head_dim) // size * size
        keys_at_once = max(size, min(fits, table.shape[1]))
        tokens_at_once = max(1, SCORES_AT_ONCE // (len(table) * q.shape[2] * keys_at_once))
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


def pick_keys(
    pool: IndexKPool,
    layer_id: int,
    index_q: torch.Tensor,
    weights: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    picks: torch.Tensor,
) -> None:
    """Write the best keys of tokens to picks [T, topk] int32, as `best_keys` returns them.

    index_q, weights: as in `index_scores`, [T, …]. slots: [R, S] int64 of the keys of R requests,
    each with T / R of the tokens. positions: [T], each token's place among the keys.
    """
    q, w, places, into = (
        tensor.view(len(slots), -1, *tensor.shape[1:])
        for tensor in (index_q.contiguous(), weights.contiguous(), positions, picks)
    )
    topk, num_keys, per_key = picks.shape[1], slots.shape[1], len(slots) * q.shape[2]
    keys_at_once = max(1, min(num_keys, SCORES_AT_ONCE // per_key))
    tokens_at_once = max(1, SCORES_AT_ONCE // (per_key * keys_at_once))
    for start in range(0, q.shape[1], tokens_at_once):
        some = slice(start, start + tokens_at_once)
        if num_keys > topk:
            parts = [
                index_scores(q[:, some], pool.keys(layer_id, part), w[:, some])
                for part in torch.split(slots, keys_at_once, dim=1)
            ]
            scores = torch.cat(parts, dim=-1)
        else:  # all are seen, whatever their scores
            scores = torch.zeros((*places[:, some].shape, num_keys), device=slots.device)
        into[:, some] = best_keys(scores, places[:, some], topk)


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


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


def token_slices(spans: Sequence[tuple[int, int]]) -> list[slice]:
    """The tokens of each request among those of a step. spans: as `lens_of` returns them."""
    stops = accumulate(new for _, new in spans)
    return [slice(stop - new, stop) for stop, (_, new) in zip(stops, spans, strict=True)]


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
