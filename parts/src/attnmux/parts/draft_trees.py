"""Draft trees on backends without masks: prefixes by a decode step, drafts here, merged by LSE."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial

import torch

from attnmux.core import (
    AttentionBackend,
    AttentionCall,
    BackendContext,
    Decision,
    DispatchingBackend,
    ForwardBatch,
    ForwardMode,
    InvalidInput,
    LayerSpec,
    UpProjection,
    make_backend,
)
from attnmux.core.plugin import (
    FixedTensors,
    MakeBackend,
    MemberSteps,
    check_trees,
    prepared,
    shared_kernel,
)
from attnmux.parts.draft_attention import (
    DraftAttention,
    DraftKeys,
    SeenPrefixes,
    Trees,
    attend_to_drafts,
    sinks_as_heads,
)
from attnmux.parts.requests import prefixes_request, undrafted_request


class TreeAttnBackend(DispatchingBackend):
    """Verifies draft trees with backends that take no mask. Other steps are those of `child`.

    In a TARGET_VERIFY step, `prefixes` decodes one token for each request, whose query heads are
    those of all its drafts, over the prefix. Each draft attends to the drafts that its tree lets it
    see, by a kernel if a plugin offers one for the device. Both are merged by LSE.
    """

    def __init__(
        self,
        context: BackendContext,
        *,
        child: AttentionBackend,
        prefixes: AttentionBackend,
        attend: DraftAttention = attend_to_drafts,
    ) -> None:
        """prefixes: a backend of `prefix_context(context)`. attend: a kernel of the device.

        Raises InvalidInput for backends of other pools or heads, and for padding rows of different
        lengths, since one graph runner pads for both.
        """
        super().__init__(context, (child, prefixes))
        drafts = context.request.spec_draft_tokens
        for argument, backend, heads in (("child", child, 1), ("prefixes", prefixes, drafts)):
            member_context = backend.context
            if (
                heads is None
                or member_context.token_to_kv_pool is not context.token_to_kv_pool
                or member_context.req_to_token_pool is not context.req_to_token_pool
                or member_context.layers[0].tp_q_head_num != context.layers[0].tp_q_head_num * heads
            ):
                expected = f"a backend of {'prefix_context(context)' if heads != 1 else 'context'}"
                raise InvalidInput(argument, got="a backend of another context", expected=expected)
        self.check_padding("prefixes", child, prefixes)
        self.child = child
        self.prefixes = prefixes
        self._attend = attend
        self._drafts = drafts or 1
        self._fixed = FixedTensors()
        self._trees: Trees | None = None

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self.child.init_cuda_graph_state(max_bs, max_num_tokens)
        self.prefixes.init_cuda_graph_state(max_bs, max_bs)
        trees = Trees.blank(max_bs, max_num_tokens // max_bs, self.context.device)
        self._fixed.add(**{field.name: getattr(trees, field.name) for field in fields(trees)})

    def parts(self, batch: ForwardBatch, *, eager: bool) -> MemberSteps:
        if eager:
            self.check_step(batch)
        verifies = batch.forward_mode.is_target_verify()
        return ((self.prefixes if verifies else self.child, self._of_one(batch)),)

    def check_lse(self, layer: LayerSpec, batch: ForwardBatch) -> None:
        """That of trees is merged here."""
        if not batch.forward_mode.is_target_verify():
            super().check_lse(layer, batch)

    def forward_extend(self, call: AttentionCall, batch: ForwardBatch) -> torch.Tensor:
        if not batch.forward_mode.is_target_verify():
            return super().forward_extend(call, batch)
        trees, layer = prepared(self._trees), call.layer
        keys = DraftKeys.of(self.context.token_to_kv_pool, layer, batch.out_cache_loc)
        seen = self._of_prefixes(call, trees.visible.shape[1])
        return self._attend(call.q, keys, seen, trees, layer, q_rope=call.q_rope, lse=call.lse)

    def forward_latent(
        self,
        q: torch.Tensor,
        latent: torch.Tensor,
        k_rope: torch.Tensor,
        layer: LayerSpec,
        batch: ForwardBatch,
        projection: UpProjection,
    ) -> torch.Tensor:
        if batch.forward_mode.is_target_verify():
            return AttentionBackend.forward_latent(
                self, q, latent, k_rope, layer, batch, projection
            )
        return super().forward_latent(q, latent, k_rope, layer, batch, projection)

    def as_served(self, batch: ForwardBatch) -> ForwardBatch:
        return self.step_of(self.child) if batch.forward_mode.is_draft_extend() else batch

    def _of_one(self, batch: ForwardBatch) -> ForwardBatch:
        """The step that one of the backends prepares. No backend was chosen for drafts, so a draft
        model's own steps run as plain prompts."""
        self._trees = None
        if batch.forward_mode.is_draft_extend():
            return replace(batch, forward_mode=ForwardMode.EXTEND, spec_info=None)
        if not batch.forward_mode.is_target_verify():
            return batch
        if self.context.debug:
            check_trees(batch)
        # An empty prefix gets a token, because each request of a decode step has one. Its share of
        # the answer is dropped
        lens = batch.seq_lens.clamp(min=1)
        new_trees = Trees(
            lens=lens,
            positions=lens.long() - 1,
            sees_prefix=batch.seq_lens > 0,
            visible=batch.visible_drafts(),
        )
        width = new_trees.visible.shape[1]
        if width > self._drafts:
            expected = f"at most {self._drafts}, the request's spec_draft_tokens"
            raise InvalidInput("spec_info.draft_token_num", got=width, expected=expected)
        self._trees = trees = self._fixed.holding(new_trees)
        lens_cpu = None if batch.seq_lens_cpu is None else batch.seq_lens_cpu.clamp(min=1)
        return ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            actual_forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=batch.batch_size,
            req_pool_indices=batch.req_pool_indices,
            seq_lens=trees.lens,
            out_cache_loc=batch.out_cache_loc[: batch.batch_size],
            positions=trees.positions,
            seq_lens_cpu=lens_cpu,
            seq_lens_sum=None if lens_cpu is None else int(lens_cpu.sum()),
        )

    def _of_prefixes(self, call: AttentionCall, width: int) -> SeenPrefixes:
        """width: drafts of each request."""
        layer = self.prefixes.context.layer(call.layer.layer_id)
        groups, step = call.layer.tp_k_head_num, self.step_of(self.prefixes)
        q = SeenPrefixes.as_heads(call.q, groups, width, self._drafts)
        q_rope = call.q_rope
        q_rope = (
            None if q_rope is None else SeenPrefixes.as_heads(q_rope, groups, width, self._drafts)
        )
        lse = q.new_empty(q.shape[:2], dtype=torch.float32)
        prefix = AttentionCall(q, None, None, layer, save_kv_cache=False, q_rope=q_rope, lse=lse)
        return SeenPrefixes(out=self.prefixes.forward_decode(prefix, step), lse=lse)


def prefix_context(context: BackendContext) -> BackendContext:
    """The context of the backend that reads the prefixes of draft trees.

    Its layers have the query heads of all drafts, those of one KV head together. Raises
    InvalidInput for a request without `spec_draft_tokens` or `num_q_heads`, and for layers whose
    parts cannot be merged by LSE.
    """
    request = prefixes_request(context.request)
    drafts = context.request.spec_draft_tokens or 1
    layers = []
    for layer in context.layers:
        if not layer.is_mergeable or layer.is_cross_attention:
            expected = "self attention of kind mha or mla, without windows, chunks and biases"
            raise InvalidInput("layers", got=f"layer {layer.layer_id}", expected=expected)
        sinks = layer.sinks
        if sinks is not None:
            heads_of = partial(sinks_as_heads, groups=layer.tp_k_head_num, drafts=drafts)
            sinks = layer.sink_copies.in_form(sinks, heads_of)
        heads = layer.tp_q_head_num * drafts
        layers.append(replace(layer, tp_q_head_num=heads, sinks=sinks))
    # A decode step over prefixes contradicts the request table, and the step was checked whole
    return replace(context, request=request, layers=tuple(layers), debug=False)


def make_trees(
    inner: MakeBackend, decision: Decision, context: BackendContext, phases: Sequence[str]
) -> AttentionBackend:
    """The factory of the part `draft_trees`."""
    if "decode" not in phases:
        return inner(context, phases)
    plain = replace(context, request=undrafted_request(context.request))
    return TreeAttnBackend(
        context,
        child=inner(plain, phases),
        prefixes=make_backend(
            decision.parts["draft_trees"]["prefixes"]["decode"], prefix_context(context)
        ),
        attend=shared_kernel("draft_attention", context) or attend_to_drafts,
    )
