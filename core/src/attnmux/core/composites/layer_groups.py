"""Layers that differ in heads, dims or KV dtype: a backend for each group that is alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import MappingProxyType

import torch

from attnmux.core.choosing.decision import Decision
from attnmux.core.composites.dispatch import CompositeBackend, MemberSteps, Route
from attnmux.core.contract.backend import AttentionBackend
from attnmux.core.contract.batch import ForwardBatch
from attnmux.core.contract.call import AttentionCall
from attnmux.core.contract.context import BackendContext
from attnmux.core.contract.layer import LayerSpec
from attnmux.core.contract.mode import ForwardMode
from attnmux.core.facts.errors import InvalidInput
from attnmux.core.facts.request import Request
from attnmux.core.facts.values import shape_said


class LayerGroupsBackend(CompositeBackend):
    """Sends each layer to the backend of its group, and prepares every step for all groups.

    The groups share request table, slots and batch, so that one graph holds the whole model.
    """

    def __init__(self, context: BackendContext, groups: Sequence[AttentionBackend]) -> None:
        """context: with the layers of all groups. Each group has a context with its own.

        Raises InvalidInput for layers without a group or with several, and for backends whose
        padding rows differ in length, since one graph runner pads for all.
        """
        super().__init__(context, groups)
        ids = [layer.layer_id for group in groups for layer in group.context.layers]
        if sorted(ids) != sorted(layer.layer_id for layer in context.layers):
            expected = "each layer of the context in one group"
            raise InvalidInput("groups", got=f"layers {sorted(ids)}", expected=expected)
        self.check_padding("groups", *groups)
        self._by_layer = MappingProxyType(
            {layer.layer_id: group for group in groups for layer in group.context.layers}
        )

    def select(self, mode: ForwardMode) -> AttentionBackend:
        children = tuple(group.select(mode) for group in self.members)
        if children == self.members:
            return self
        return LayerGroupsBackend(self.context, children)

    def parts(self, batch: ForwardBatch, *, eager: bool) -> MemberSteps:
        return ((group, batch) for group in self.members)

    def route(self, call: AttentionCall, batch: ForwardBatch) -> Route:
        return self._by_layer[call.layer.layer_id], call, batch

    def save_kv(
        self,
        k: torch.Tensor,
        v: torch.Tensor | None,
        layer: LayerSpec,
        batch: ForwardBatch,
        *,
        k_rope: torch.Tensor | None = None,
    ) -> None:
        self._by_layer[layer.layer_id].save_kv(k, v, layer, batch, k_rope=k_rope)


def group_contexts(
    decision: Decision, context: BackendContext
) -> Iterator[tuple[Decision, BackendContext]]:
    """Each group of the decision, with the context of its layers and their pool: the whole context
    if all layers are alike.

    Raises InvalidInput for a layer of no group's heads, dims and KV dtype, and for a group without
    layers.
    """
    if not decision.others:
        yield decision, context
        return
    groups = decision.groups
    grouped: list[list[LayerSpec]] = [[] for _ in groups]
    for layer in context.layers:
        stored = layer.kv_dtype or decision.kv_dtype
        fitting = (n for n, group in enumerate(groups) if _fits(layer, stored, group.request))
        place = next(fitting, None)
        if place is None:
            shape = f"{layer.tp_q_head_num}/{layer.tp_k_head_num} heads of {layer.qk_head_dim}"
            shape += f", KV in {stored}"
            expected = "the heads, dims and KV dtype of one of the decision's groups"
            raise InvalidInput(f"layer {layer.layer_id}", got=shape, expected=expected)
        grouped[place].append(layer)
    for group, layers in zip(groups, grouped, strict=True):
        if not layers:
            expected = f"layers of each group: {shape_said(group.request)}"
            raise InvalidInput("context.layers", got="none of a group", expected=expected)
        pool = context.token_to_kv_pool.of_layers([layer.layer_id for layer in layers])
        own_context = replace(
            context, request=group.request, layers=tuple(layers), token_to_kv_pool=pool
        )
        yield group, own_context


def _fits(layer: LayerSpec, stored: str, request: Request) -> bool:
    """Whether the layer has the heads, the dims and the reach of the request's. stored: the KV
    dtype of the layer."""
    return (
        (layer.tp_q_head_num, layer.tp_k_head_num) == (request.num_q_heads, request.num_kv_heads)
        and (layer.qk_head_dim, layer.v_head_dim)
        == (request.head_dim, request.v_head_dim or request.head_dim)
        and stored == request.kv_dtype
        and (layer.sliding_window_size < 0 or request.sliding_window is not None)
        and (layer.attention_chunk_size == 0 or request.attention_chunk is not None)
    )
