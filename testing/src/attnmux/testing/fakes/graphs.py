"""A correct, slow backend that can be captured in device graphs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from attnmux.core import AttentionBackend, AttentionCall, BackendContext, ForwardBatch, LayerSpec
from attnmux.core.plugin import ANY, BackendCard, Condition
from attnmux.testing.fakes.backend import FakeBackend, fake_card
from attnmux.testing.reference.dense import drafts_seen, expand_dual_chunk, visibility


def graph_card(**changes: Condition) -> BackendCard:
    """The card of `GraphFakeBackend`: that of `FakeBackend`, with graphs."""
    factory = "attnmux.testing.fakes.graphs:GraphFakeBackend"
    return replace(fake_card(graph=ANY, **changes), factory=factory)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GraphState:
    """Buffers that captured steps read, for a largest batch.

    The `raw_` ones are written outside of the graph, the others in it.
    """

    raw_rows: torch.Tensor
    """[B] int64"""
    raw_lens: torch.Tensor
    """[B] int32, the batch's `seq_lens`."""
    raw_encoder: torch.Tensor
    """[B] int32"""
    cached: torch.Tensor
    """[B] int32: tokens before the new ones; -1 for a decoding request of length 0."""
    slots: torch.Tensor
    """[B, max_context_len] int32"""

    @property
    def max_batch_size(self) -> int:
        return self.cached.shape[0]

    def fits(self, batch: ForwardBatch) -> bool:
        """Whether the buffers have room for the step. A larger one runs eagerly without them."""
        return _is_static(batch) and batch.batch_size <= self.max_batch_size

    @classmethod
    def make(cls, max_bs: int, max_context_len: int, device: torch.device) -> GraphState:
        lens = torch.zeros(max_bs, dtype=torch.int32, device=device)
        return cls(
            raw_rows=lens.long(),
            raw_lens=lens,
            raw_encoder=lens.clone(),
            cached=lens.clone(),
            slots=torch.zeros((max_bs, max_context_len), dtype=torch.int32, device=device),
        )


class GraphFakeBackend(FakeBackend):
    """`FakeBackend` with static shapes in DECODE and TARGET_VERIFY.

    Lengths are copied outside of the graph; the table of slots is built inside, from the present
    contents of the buffers.
    """

    def __init__(
        self, context: BackendContext, options: Mapping[str, object] = AttentionBackend.NO_OPTIONS
    ) -> None:
        super().__init__(context, options)
        self.states: list[GraphState] = []

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        if all(state.max_batch_size < max_bs for state in self.states):
            context = self.context
            self.states.append(GraphState.make(max_bs, context.max_context_len, context.device))

    def state_of(self, batch: ForwardBatch) -> GraphState | None:
        """The first state with room for the step, at capture and replay alike; None without one."""
        return next((state for state in self.states if state.fits(batch)), None)

    def init_forward_metadata_out_graph(
        self, batch: ForwardBatch, in_capture: bool = False
    ) -> None:
        state, size = self.state_of(batch), batch.batch_size
        if state is None:
            super().init_forward_metadata_out_graph(batch, in_capture)
            return
        state.raw_rows[:size] = batch.req_pool_indices
        state.raw_lens[:size] = batch.seq_lens
        if batch.encoder_lens is not None:
            state.raw_encoder[:size] = batch.encoder_lens

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        state, size = self.state_of(batch), batch.batch_size
        if state is None:
            super().init_forward_metadata_in_graph(batch)
            return
        torch.sub(
            state.raw_lens[:size], int(batch.forward_mode.is_decode()), out=state.cached[:size]
        )
        table = self.context.req_to_token_pool.req_to_token[:, : state.slots.shape[1]]
        torch.index_select(table, 0, state.raw_rows[:size], out=state.slots[:size])

    def _forward(
        self,
        call: AttentionCall,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        state = self.state_of(batch)
        if state is None:
            return super()._forward(call, k, v, batch)
        q, layer, out, lse = call.q, call.layer, call.out, call.lse
        if call.q_rope is not None:
            q = torch.cat([q, call.q_rope], dim=-1)
        if out is None:
            out = q.new_zeros((q.shape[0], q.shape[1], layer.v_head_dim))
        new = q.shape[0] // batch.batch_size
        for request in range(batch.batch_size):
            rows = slice(request * new, (request + 1) * new)
            slots, exists = self._keys(layer, state, request, new)
            keys, values = self.read(layer, slots)
            # Values after the end may be NaN, which a weight of 0 does not remove
            keys, values = (rows_.where(exists[:, None, None], 0) for rows_ in (keys, values))
            keep = exists & self._visible(layer, batch, state, request, new)
            if layer.kind == "dual_chunk":
                positions = state.cached[request] + torch.arange(new, device=keep.device)
                meets = self.meets(layer, positions, keep.shape[1])
                keys, values, keep = expand_dual_chunk(keys, values, keep, meets)
            positions = state.cached[request] + torch.arange(new, device=keep.device)
            queries, keys = self.with_bias(q[rows], keys, layer, positions)
            result, result_lse = self.attend(queries, keys, values, keep, layer)
            out[rows] = result.to(out.dtype)
            if lse is not None:
                lse[rows] = result_lse.to(lse.dtype)
        return out

    def _keys(
        self, layer: LayerSpec, state: GraphState, request: int, new: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[max_context_len]: slots of a request's keys, and a mask of those that exist."""
        row, encoder = state.slots[request], state.raw_encoder[request]
        order = torch.arange(len(row), device=row.device)
        if layer.is_cross_attention:
            exists = order < encoder
        else:
            exists = order < state.cached[request] + new
            order = order + encoder
        return row.gather(0, order.clamp(max=len(row) - 1)).where(exists, 0).long(), exists

    def _visible(
        self, layer: LayerSpec, batch: ForwardBatch, state: GraphState, request: int, new: int
    ) -> torch.Tensor:
        """[new, max_context_len]: the keys that a request's tokens see."""
        num_keys, device = state.slots.shape[1], state.slots.device
        if layer.is_cross_attention:
            return torch.ones((new, num_keys), dtype=torch.bool, device=device)
        order = torch.arange(num_keys, device=device)
        positions = state.cached[request] + order[:new]
        spec, mask = batch.spec_info, None
        if spec is not None and spec.custom_mask is not None and spec.mask_indptr is not None:
            width = state.cached[request] + new
            places = spec.mask_indptr[request] + order[:new, None] * width + order
            mask = spec.custom_mask[places.clamp(max=len(spec.custom_mask) - 1).long()]
        trees, key_positions = drafts_seen(batch), None
        if trees is not None:
            node = order - state.cached[request]
            is_draft, node = (node >= 0) & (node < new), node.clamp(0, new - 1).long()
            depths = trees[request].sum(1) - 1
            key_positions = torch.where(is_draft, state.cached[request] + depths[node], order)
            mask = trees[request][:, node] | ~is_draft
            positions = state.cached[request] + depths
        if batch.topk_indices is not None:
            picks = batch.topk_indices[request * new : (request + 1) * new]
            mask = (picks.unsqueeze(-1) == order).any(1)
        return visibility(
            positions,
            num_keys,
            key_positions=key_positions,
            causal=layer.is_causal,
            window=layer.sliding_window_size,
            chunk=layer.attention_chunk_size,
            custom_mask=mask,
        )


def _is_static(batch: ForwardBatch) -> bool:
    return batch.forward_mode.is_decode() or batch.forward_mode.is_target_verify()
