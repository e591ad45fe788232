"""Layers whose tokens see the blocks of keys that an indexer picks, on any backend.

Such a layer has K and V as others have, and an indexer that picks blocks for each token and KV head
(MiniMax-M3). The decided backend serves the layers without an indexer, and every layer in steps
over so few keys that all blocks are picked. The others gather their blocks from the pool, by a
kernel that a plugin offers for the device, or in plain torch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from msgspec import structs

from attnmux.core.arguments import check_picked_blocks
from attnmux.core.backend import AttentionBackend
from attnmux.core.batch import ForwardBatch, ForwardMode
from attnmux.core.call import AttentionCall
from attnmux.core.composites.block_attention import PickedBlocks, PlainBlocks
from attnmux.core.composites.dispatch import CompositeBackend, Parts, Route
from attnmux.core.errors import AttnmuxError, InvalidInput
from attnmux.core.indices.topk import token_rows
from attnmux.core.tree_masks import check_unmasked

if TYPE_CHECKING:
    from attnmux.core.composites.block_attention import AttendsToBlocks
    from attnmux.core.context import BackendContext

NO_STEP = "no step is prepared: call init_forward_metadata(batch) first"


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
        self._plain: ForwardBatch | None = None

    def parts(self, batch: ForwardBatch, *, eager: bool) -> Parts:
        """Raises InvalidInput for a mask and for many items: the indexer masks."""
        if eager:
            self.check_step(batch)
        check_unmasked(batch)
        if eager:
            self._take_rows(batch)
        self._sees_all = eager and self._picks_all(batch)
        self._plain = replace(batch, topk_indices=None)
        return ((self.dense, self._plain),)

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
        """Of layers that see all of their keys."""
        if self._plain is None:
            raise AttnmuxError(NO_STEP)
        layer = self.dense.context.layer(call.layer.layer_id)
        return self.dense, structs.replace(call, layer=layer), self._plain

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
        if self._rows is None:
            raise AttnmuxError(NO_STEP)
        if call.has_own_kv:
            expected = "True: an indexer picks blocks of the pool"
            raise InvalidInput("save_kv_cache", got=False, expected=expected)
        if picks is None:
            expected = "the blocks that the indexer picked: the model writes them before each layer"
            raise InvalidInput("topk_indices", got=None, expected=expected)
        check_picked_blocks(picks, call.q.shape[0])
        heads = picks.shape[1]
        if heads < 1 or heads % layer.tp_k_head_num or layer.tp_q_head_num % heads:
            expected = f"a multiple of {layer.tp_k_head_num}, in {layer.tp_q_head_num} query heads"
            raise InvalidInput("topk_indices", got=f"blocks for {heads} heads", expected=expected)
        picked = PickedBlocks(
            picks=picks,
            size=layer.index_block_size,
            table=self.context.req_to_token_pool.req_to_token,
            rows=self._rows,
            positions=batch.positions,
        )
        return self._attend(call, picked)

    def _picks_all(self, batch: ForwardBatch) -> bool:
        """Whether the host knows that an eager step has no more keys than are picked. Not asked
        where results must not depend on other requests of the batch."""
        lens, reach = batch.seq_lens_cpu, self.context.request.index_reach
        mode = batch.forward_mode
        if lens is None or reach is None or self.context.request.deterministic:
            return False
        return not mode.is_target_verify() and (not lens.numel() or int(lens.max()) <= reach)
