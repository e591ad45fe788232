"""Layers whose tokens see the blocks of keys that an indexer picks, on any backend.

Such a layer has K and V as others have, and an indexer that picks blocks for each token and KV head
(MiniMax-M3). The decided backend serves the layers without an indexer, and every layer in steps
over so few keys that all blocks are picked. The others gather their blocks from the pool, by a
kernel that a plugin offers for the device, or in plain torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from msgspec import structs

from attnmux.core import (
    AttentionBackend,
    AttentionCall,
    BackendContext,
    Decision,
    ForwardBatch,
    ForwardMode,
    InvalidInput,
    KVPool,
)
from attnmux.core.plugin import (
    CompositeBackend,
    MakeBackend,
    MemberSteps,
    Route,
    check_tensor,
    prepared,
    shared_kernel,
    token_rows,
)

GATHERED_VALUES = 2**22
"""Values of K that are gathered at once: 16 MiB of float32."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PickedBlocks:
    """The keys of a step's T tokens."""

    picks: torch.Tensor
    """[T, Hp, topk] int32, as `ForwardBatch.topk_indices`."""
    size: int
    """Keys of a block."""
    table: torch.Tensor
    """[rows, max_context] int32, the request table."""
    rows: torch.Tensor
    """[T] int64: each token's row of it."""
    positions: torch.Tensor
    """[T] int64: each token's place. It sees no later key."""


class AttendsToBlocks(Protocol):
    """Attention of one layer to picked blocks in the pool."""

    def __call__(self, call: AttentionCall, picked: PickedBlocks) -> torch.Tensor:
        """Return `call.out`, or another [T, Hq, Dv]; write `call.lse` if given.

        Does not synchronise; shapes are static.
        """


class PlainBlocks:
    """On any device, in float32, a few tokens at a time."""

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool

    def __call__(self, call: AttentionCall, picked: PickedBlocks) -> torch.Tensor:
        layer, q = call.layer, call.q.detach()
        keys, values = self._pool.get_kv_buffer(layer.layer_id)
        k_scale, v_scale = self._pool.read_scales(layer.k_scale, layer.v_scale)
        heads, topk = picked.picks.shape[1:]
        groups = q.view(len(q), heads, -1, q.shape[-1])
        # The KV head of each head of the picks
        of_head = torch.arange(heads, device=q.device) * layer.tp_k_head_num // heads
        out = call.out
        if out is None:
            out = q.new_empty((len(q), layer.tp_q_head_num, layer.v_head_dim))
        values_a_token = heads * topk * picked.size * layer.qk_head_dim
        at_once = max(1, GATHERED_VALUES // max(1, values_a_token))
        for start in range(0, len(q), at_once):
            some = slice(start, start + at_once)
            slots, hidden = self._slots(layer.layer_id, picked, some)
            k, v = (
                _gathered(buffer, slots, of_head.view(1, -1, 1), hidden)
                for buffer in (keys, values)
            )
            logits = torch.einsum("tpgd,tpkd->tpgk", groups[some].float(), k)
            logits = logits * (layer.scaling * k_scale)
            logits = logits.masked_fill(hidden.unsqueeze(2), -torch.inf)
            lse = logits.logsumexp(-1)
            weights = torch.exp(logits - lse.masked_fill(lse.isneginf(), 0).unsqueeze(-1))
            result = torch.einsum("tpgk,tpkd->tpgd", weights, v) * v_scale
            out[some] = result.flatten(1, 2).to(out.dtype)
            if call.lse is not None:
                call.lse[some] = lse.flatten(1)
        return out

    def _slots(
        self, layer_id: int, picked: PickedBlocks, some: slice
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots [t, Hp, topk * size] of the layer, and whether each is no key of the token."""
        picks = picked.picks[some].long().unsqueeze(-1)
        within = torch.arange(picked.size, device=picks.device)
        places = (picks * picked.size + within).flatten(2)
        # A block that is no pick is at a place below 0
        hidden = (places < 0) | (places > picked.positions[some].view(-1, 1, 1))
        rows = picked.rows[some].view(-1, 1, 1)
        slots = picked.table[rows, places.masked_fill(hidden, 0)]
        return self._pool.translate(slots.long(), layer_id).long(), hidden


def _gathered(
    cache: torch.Tensor, slots: torch.Tensor, heads: torch.Tensor, hidden: torch.Tensor
) -> torch.Tensor:
    """[t, Hp, n, D] float32 of cache [slots, Hkv, D]; 0 if hidden, since that may be NaN."""
    # torch gathers bytes on every device, 8-bit floats not on all
    raw = cache.detach().view(torch.uint8) if cache.itemsize == 1 else cache.detach()
    rows = raw[slots, heads].view(cache.dtype).float()
    return rows.masked_fill(hidden.unsqueeze(-1), 0)


def dense_context(context: BackendContext) -> BackendContext:
    """The context of a backend that knows nothing of indexers: all layers, without theirs."""
    return replace(
        context,
        layers=tuple(replace(layer, index_block_size=0) for layer in context.layers),
        request=context.request.replace(origin="model", index_topk=None, index_block_size=None),
    )


class PickedBlocksBackend(CompositeBackend):
    """Serves prompts, decode steps, and drafts in chains. Graphs are those of the dense backend."""

    def __init__(
        self,
        context: BackendContext,
        *,
        dense: AttentionBackend,
        attend: AttendsToBlocks | None = None,
    ) -> None:
        """dense: of `dense_context`. attend: None takes plain torch operations."""
        super().__init__(context, (dense,))
        self.dense = dense
        self._attend = PlainBlocks(context.token_to_kv_pool) if attend is None else attend
        self._rows: torch.Tensor | None = None
        self._sees_all = False

    def parts(self, batch: ForwardBatch, *, eager: bool) -> MemberSteps:
        """Raises InvalidInput for a mask and for many items: the indexer masks."""
        if eager:
            self.check_step(batch)
        batch.check_unmasked()
        if eager:
            self._take_rows(batch)
        self._sees_all = eager and self._picks_all(batch)
        return ((self.dense, replace(batch, topk_indices=None)),)

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        super().init_forward_metadata_in_graph(batch)
        self._take_rows(batch)

    def _take_rows(self, batch: ForwardBatch) -> None:
        """Note each token's row of the request table, by operations of static shape."""
        if batch.forward_mode is ForwardMode.IDLE:
            return
        rows, new = batch.req_pool_indices, batch.extend_seq_lens
        if batch.forward_mode.is_extend() and new is not None:
            rows = token_rows(rows, new, batch.num_tokens)
        self._rows = rows

    def route(self, call: AttentionCall, batch: ForwardBatch) -> Route:
        """Route of layers that see all of their keys."""
        layer = self.dense.context.layer(call.layer.layer_id)
        return self.dense, structs.replace(call, layer=layer), self.step_of(self.dense)

    def forward_decode(self, call: AttentionCall, batch: ForwardBatch) -> torch.Tensor:
        if self._sees_all or not call.layer.index_block_size:
            return super().forward_decode(call, batch)
        return self._over_blocks(call, batch)

    def forward_extend(self, call: AttentionCall, batch: ForwardBatch) -> torch.Tensor:
        if self._sees_all or not call.layer.index_block_size:
            return super().forward_extend(call, batch)
        return self._over_blocks(call, batch)

    def _over_blocks(self, call: AttentionCall, batch: ForwardBatch) -> torch.Tensor:
        layer, picks = call.layer, batch.topk_indices
        rows = prepared(self._rows)
        if call.has_own_kv:
            expected = "True: an indexer picks blocks of the pool"
            raise InvalidInput("save_kv_cache", got=False, expected=expected)
        if picks is None:
            expected = "the blocks that the indexer picked: the model writes them before each layer"
            raise InvalidInput("topk_indices", got=None, expected=expected)
        shape = (call.q.shape[0], "heads", "topk")
        check_tensor("topk_indices", picks, shape, None, torch.int32)
        heads = picks.shape[1]
        if heads < 1 or heads % layer.tp_k_head_num or layer.tp_q_head_num % heads:
            expected = f"a multiple of {layer.tp_k_head_num}, in {layer.tp_q_head_num} query heads"
            raise InvalidInput("topk_indices", got=f"blocks for {heads} heads", expected=expected)
        picked = PickedBlocks(
            picks=picks,
            size=layer.index_block_size,
            table=self.context.req_to_token_pool.req_to_token,
            rows=rows,
            positions=batch.positions,
        )
        return self._attend(call, picked)

    def _picks_all(self, batch: ForwardBatch) -> bool:
        """Whether the host knows that an eager step has no more keys than are picked. Not asked
        if results must not depend on other requests of the batch."""
        lens, reach = batch.seq_lens_cpu, self.context.request.index_reach
        mode = batch.forward_mode
        if lens is None or reach is None or self.context.request.deterministic:
            return False
        return not mode.is_target_verify() and (not lens.numel() or int(lens.max()) <= reach)


def make_picked_blocks(
    inner: MakeBackend, decision: Decision, context: BackendContext, phases: Sequence[str]
) -> AttentionBackend:
    """The factory of the part `picked_blocks`."""
    if not any(layer.index_block_size for layer in context.layers):
        return inner(context, phases)
    return PickedBlocksBackend(
        context,
        dense=inner(dense_context(context), phases),
        attend=shared_kernel("picked_blocks", context),
    )
