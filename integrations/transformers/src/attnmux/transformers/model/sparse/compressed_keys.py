"""Layers whose tokens see a window of keys and, in the same softmax, keys that each stand for a
block of tokens: all of those up to the token, or those that an indexer picks (DeepSeek-V4).

A backend serves the window. LSE merges its result with attention to the keys of blocks, and with
the sinks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from attnmux.core import AttentionCall, BackendContext, ForwardBatch, LayerSpec
from attnmux.core.plugin import shared_kernel, token_rows
from attnmux.parts import PickedBlocks, PlainBlocks, add_sinks, merge_into
from attnmux.transformers.model.sparse.compressed_pool import CompressedPool
from attnmux.transformers.model.sparse.picks import lens_of, pick_keys, token_slices

TOGETHER = 64
"""Keys that are picked as one if a token sees all."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BlockRows:
    """The rows from which the keys of n blocks are made."""

    rows: torch.Tensor
    """[n, num_blocks * block_size, row_dim] in the dtype of the model, by token; the own block is
    last."""
    missing: torch.Tensor
    """[n, num_blocks * block_size] bool: places before a request's first token, of any value."""
    starts: torch.Tensor
    """[n] int64: the place of the own block's first token."""


MakesKeys = Callable[[BlockRows], tuple[torch.Tensor, torch.Tensor | None]]
"""Keys [n, head_dim], and those of the indexer [n, index_dim], if there is one."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class IndexQueries:
    """The queries by which an indexer scores keys: see `index_scores`."""

    q: torch.Tensor
    """[T, Hi, index_dim]"""
    weights: torch.Tensor
    """[T, Hi]"""


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """How a step's tokens lie in its requests."""

    of_token: torch.Tensor
    """[T] int64: each token's request in the batch."""
    spans: tuple[tuple[int, int], ...] | None
    """(cached, new) tokens of each request; None if all have as many new ones."""
    num_keys: int
    """Keys of the longest request."""


class CompressedKeys:
    """Writes and reads the keys of blocks of layers that are alike."""

    def __init__(
        self, pool: CompressedPool, context: BackendContext, layers: Sequence[LayerSpec]
    ) -> None:
        """layers: those of the pool, as their backend knows them. The kernel for picked blocks is
        taken if a plugin offers it for the device, else plain torch."""
        self.pool = pool
        self._table = context.req_to_token_pool.req_to_token
        alone = [
            replace(layer, sliding_window_size=-1, sinks=None, k_scale=None, v_scale=None)
            for layer in layers
        ]
        self._layers = {layer.layer_id: layer for layer in alone}
        of_keys = replace(context, layers=tuple(alone), token_to_kv_pool=pool.keys)
        self._attend = shared_kernel("picked_blocks", of_keys) or PlainBlocks(pool.keys)

    def write(
        self,
        layer_id: int,
        rows: torch.Tensor,
        batch: ForwardBatch,
        make: MakesKeys,
        *,
        captured: bool = False,
    ) -> None:
        """Keep rows [T, row_dim] of a step's tokens, and the keys of blocks that end with one.

        captured: shapes are static, as device graphs require. Drafts of a step are chains: rejected
        tokens are overwritten.
        """
        pool, size = self.pool, self.pool.shape.block_size
        pool.rows.set_keys(layer_id, pool.own_slots(batch.out_cache_loc), rows)
        step = self._step(batch, captured)
        if step.spans is None:  # all tokens, of which the others write zeros to the reserved slot
            places, of_token = batch.positions, step.of_token
        else:
            tokens = _ends(step.spans, size).to(rows.device)
            places, of_token = batch.positions[tokens], step.of_token[tokens]
        if not len(places):
            return
        table_rows = batch.req_pool_indices[of_token]
        seen = places.unsqueeze(1) - torch.arange(
            pool.shape.earlier_tokens, -1, -1, device=places.device
        )
        slots = self._table[table_rows.unsqueeze(1), seen.clamp(min=0)].long()
        new_rows = make(
            BlockRows(
                rows=pool.rows.keys(layer_id, pool.own_slots(slots)).to(rows.dtype),
                missing=seen < 0,
                starts=(places - size + 1).clamp(min=0),
            )
        )
        is_end = (places + 1) % size == 0
        loc = torch.where(is_end, pool.key_slots(slots[:, -1]), 0)
        keys, index_keys = (
            tensor if tensor is None else tensor.masked_fill(~is_end.unsqueeze(1), 0)
            for tensor in new_rows
        )
        assert keys is not None
        keys = keys.unsqueeze(1)
        pool.keys.set_kv_buffer(self._layers[layer_id], loc, keys, keys)
        if pool.index_keys is not None and index_keys is not None:
            pool.index_keys.set_keys(layer_id, loc, index_keys)

    def attend(
        self,
        layer_id: int,
        q: torch.Tensor,
        batch: ForwardBatch,
        out: torch.Tensor,
        lse: torch.Tensor,
        *,
        queries: IndexQueries | None = None,
        sinks: torch.Tensor | None = None,
        captured: bool = False,
    ) -> None:
        """Add the keys of blocks to attention that has seen the window, in place, then the sinks.

        q: [T, Hq, D]. out: [T, Hq, D] float32. lse: [T, Hq] float32. queries: in a layer with an
        indexer.
        """
        step = self._step(batch, captured)
        if step.num_keys:
            table = self._table[batch.req_pool_indices]
            size = self.pool.shape.block_size
            table = self.pool.key_slots(table[:, size - 1 :: size][:, : step.num_keys])
            last = (batch.positions + 1) // size - 1
            if queries is None:
                picks, together = _all(step.num_keys, len(q), q.device), TOGETHER
            else:
                picks, together = self._best(layer_id, queries, table, last, step), 1
            picked = PickedBlocks(
                picks=picks,
                size=together,
                table=table.contiguous(),
                rows=step.of_token,
                positions=last,
            )
            theirs = torch.empty_like(lse)
            call = AttentionCall(q, None, None, self._layers[layer_id], lse=theirs)
            merge_into(out, lse, self._attend(call, picked), theirs)
        if sinks is not None:
            add_sinks(out, lse, sinks)

    def _best(
        self,
        layer_id: int,
        queries: IndexQueries,
        table: torch.Tensor,
        last: torch.Tensor,
        step: _Step,
    ) -> torch.Tensor:
        """[T, 1, topk] int32: the keys that the indexer picks. table: [B, keys]. last: [T]."""
        pool, topk = self.pool.index_keys, self.pool.shape.topk
        assert pool is not None  # layers with an indexer have keys for it
        q, weights = queries.q, queries.weights
        if step.spans is None:
            requests = [(table, slice(None))]
        else:
            requests = list(zip(torch.split(table, 1), token_slices(step.spans), strict=True))
        picks = torch.full((len(q), topk), -1, dtype=torch.int32, device=q.device)
        for slots, some in requests:
            tensors = q[some], weights[some], slots.long(), last[some], picks[some]
            pick_keys(pool, layer_id, *tensors)
        return picks.unsqueeze(1)

    def _step(self, batch: ForwardBatch, captured: bool) -> _Step:
        size = self.pool.shape.block_size
        num_tokens, requests = batch.num_tokens, batch.batch_size
        every = torch.arange(requests, device=batch.positions.device)
        new_lens = batch.extend_seq_lens if batch.forward_mode.is_extend() else None
        if new_lens is not None and not captured:
            spans = tuple(lens_of(batch))
            of_token = token_rows(every, new_lens, num_tokens)
            return _Step(of_token, spans, max(sum(span) for span in spans) // size)
        new = num_tokens // max(1, requests)
        of_token = every.repeat_interleave(new, output_size=num_tokens)
        if captured:
            return _Step(of_token, None, self._table.shape[1] // size)
        lens = batch.seq_lens if batch.seq_lens_cpu is None else batch.seq_lens_cpu
        drafts = new if batch.forward_mode.is_target_verify() else 0
        longest = int(lens.max()) + drafts if requests else 0
        return _Step(of_token, None, min(longest, self._table.shape[1]) // size)


def _ends(spans: Sequence[tuple[int, int]], size: int) -> torch.Tensor:
    """The tokens of a step that end blocks, [n] int64."""
    ends, first = [torch.empty(0, dtype=torch.int64)], 0
    for cached, new in spans:
        stop = first + new
        ends.append(torch.arange(min(first + (-cached - 1) % size, stop), stop, size))
        first = stop
    return torch.cat(ends)


def _all(num_keys: int, num_tokens: int, device: torch.device) -> torch.Tensor:
    """[T, 1, n] int32: picks of all keys."""
    parts = torch.arange(-(-num_keys // TOGETHER), dtype=torch.int32, device=device)
    return parts.expand(num_tokens, 1, -1)
