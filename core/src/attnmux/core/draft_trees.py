"""Draft trees on backends without masks: prefixes by the backend, drafts here, merged by LSE."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from attnmux.core.arguments import check_fields
from attnmux.core.backend import AttentionBackend
from attnmux.core.batch import ForwardBatch, ForwardMode
from attnmux.core.call import AttentionCall
from attnmux.core.chunked_prefix import merge_into
from attnmux.core.composites import DispatchingBackend
from attnmux.core.debug import check_batch
from attnmux.core.errors import InvalidInput
from attnmux.core.kv.rows import gather_rows

if TYPE_CHECKING:
    from attnmux.core.context import BackendContext
    from attnmux.core.latent import UpProjection
    from attnmux.core.layer import LayerSpec


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Rows:
    """What a step that verifies trees asks, by draft token."""

    req_pool_indices: torch.Tensor
    """[n] int64: rows of the request table."""
    lens: torch.Tensor
    """[n] int32: tokens of the prefix, but at least 1."""
    positions: torch.Tensor
    """[n] int64: of the prefix's last token."""
    sees_prefix: torch.Tensor
    """[n] bool: whether the prefix has a token."""
    visible: torch.Tensor
    """[n, d] bool: the request's drafts that each draft sees."""

    def fits(self, other: _Rows) -> bool:
        """Whether there is room for a copy of `other`."""
        (size, width), (most, widest) = other.visible.shape, self.visible.shape
        return size <= most and size * width <= most * widest

    def copy(self, other: _Rows) -> _Rows:
        """A copy of `other`, in views of these tensors."""
        size, width = other.visible.shape
        flat = self.visible.view(-1)[: size * width]
        return _Rows(
            req_pool_indices=self.req_pool_indices[:size].copy_(other.req_pool_indices),
            lens=self.lens[:size].copy_(other.lens),
            positions=self.positions[:size].copy_(other.positions),
            sees_prefix=self.sees_prefix[:size].copy_(other.sees_prefix),
            visible=flat.view(size, width).copy_(other.visible),
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Verification:
    """A step that verifies trees, as both of its parts see it."""

    prefixes: ForwardBatch
    """A decode step of B * d requests: each draft token, and its request's prefix."""
    rows: _Rows
    slots: torch.Tensor
    """[B * d] int64: where the pool has the drafts' K and V."""


class TreeAttnBackend(DispatchingBackend):
    """Lets `child`, which takes no mask, verify draft trees: every other step is the child's own.

    In a TARGET_VERIFY step, `child` decodes B * d requests, one for each draft token, over the
    prefixes; each draft attends to the drafts that its tree lets it see; both are merged by LSE.
    The prefix is read once for each draft token.
    """

    def __init__(self, context: BackendContext, child: AttentionBackend) -> None:
        """child: a backend of `prefix_context(context)`. Raises InvalidInput for another."""
        super().__init__(context)
        own = child.context
        if (
            own.token_to_kv_pool is not context.token_to_kv_pool
            or own.req_to_token_pool is not context.req_to_token_pool
            or not own.request.lse
        ):
            expected = "a backend of prefix_context(context)"
            raise InvalidInput("child", got="a backend of another context", expected=expected)
        self.child = child
        self._buffers: list[_Rows] = []
        self._verification: _Verification | None = None
        self._catching_up: ForwardBatch | None = None

    def serving(self, batch: ForwardBatch) -> AttentionBackend:
        return self.child

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Room for as many decoding requests as the largest step has tokens."""
        room = max(max_bs, max_num_tokens)
        self.child.init_cuda_graph_state(room, room)
        device, width = self.context.device, max_num_tokens // max_bs
        made = _Rows(
            req_pool_indices=torch.zeros(room, dtype=torch.int64, device=device),
            lens=torch.ones(room, dtype=torch.int32, device=device),
            positions=torch.zeros(room, dtype=torch.int64, device=device),
            sees_prefix=torch.ones(room, dtype=torch.bool, device=device),
            visible=torch.ones(room, width, dtype=torch.bool, device=device),
        )
        if not any(each.fits(made) for each in self._buffers):
            self._buffers.append(made)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return self.child.get_cuda_graph_seq_len_fill_value()

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        check_fields(batch)
        if self.context.debug and batch.forward_mode is not ForwardMode.IDLE:
            check_batch(self.context, batch)
        if batch.forward_mode.is_target_verify():
            self.init_forward_metadata_out_graph(batch)
            self.init_forward_metadata_in_graph(batch)
        else:
            self.child.init_forward_metadata(self._as_served(batch))

    def init_forward_metadata_out_graph(
        self, batch: ForwardBatch, in_capture: bool = False
    ) -> None:
        served = self._as_served(batch)
        self.child.init_forward_metadata_out_graph(served, in_capture)

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        served = self._catching_up or batch
        if batch.forward_mode.is_target_verify():
            served = self._prepared().prefixes
        self.child.init_forward_metadata_in_graph(served)

    def forward_extend(self, call: AttentionCall, batch: ForwardBatch) -> torch.Tensor:
        if not batch.forward_mode.is_target_verify():
            return self.child.forward_extend(call, self._catching_up or batch)
        step, layer = self._prepared(), call.layer
        lse = call.q.new_empty(call.q.shape[:2], dtype=torch.float32)
        prefix = AttentionCall(
            call.q, None, None, layer, save_kv_cache=False, q_rope=call.q_rope, lse=lse
        )
        seen = self.child.forward_decode(prefix, step.prefixes)
        unseen: torch.Tensor | float = -torch.inf if layer.sinks is None else layer.sinks
        sees_prefix = step.rows.sees_prefix.unsqueeze(1)
        lse = torch.where(sees_prefix, lse, unseen)
        seen = torch.where(sees_prefix.unsqueeze(2), seen, 0)
        merged, merged_lse = self._among_drafts(call, step)
        merge_into(merged, merged_lse, seen, lse)
        if call.lse is not None:
            call.lse.copy_(merged_lse)
        return merged.to(call.q.dtype)

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
            return super().forward_latent(q, latent, k_rope, layer, batch, projection)
        served = self._catching_up or batch
        return self.child.forward_latent(q, latent, k_rope, layer, served, projection)

    def _as_served(self, batch: ForwardBatch) -> ForwardBatch:
        """The step that `child` prepares. The child was chosen without drafts in mind, so that it
        gets those of a draft model's own steps as plain prompts."""
        self._verification = self._catching_up = None
        if batch.forward_mode.is_draft_extend():
            self._catching_up = replace(batch, forward_mode=ForwardMode.EXTEND, spec_info=None)
            return self._catching_up
        if not batch.forward_mode.is_target_verify():
            return batch
        rows = _rows(batch)
        room = next((each for each in self._buffers if each.fits(rows)), None)
        rows = rows if room is None else room.copy(rows)
        lens_cpu = batch.seq_lens_cpu
        if lens_cpu is not None:
            lens_cpu = lens_cpu.clamp(min=1).repeat_interleave(_drafts(batch))
        prefixes = ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            actual_forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=len(rows.lens),
            req_pool_indices=rows.req_pool_indices,
            seq_lens=rows.lens,
            out_cache_loc=batch.out_cache_loc,
            positions=rows.positions,
            seq_lens_cpu=lens_cpu,
            seq_lens_sum=None if lens_cpu is None else int(lens_cpu.sum()),
        )
        self._verification = _Verification(prefixes=prefixes, rows=rows, slots=batch.out_cache_loc)
        return prefixes

    def _prepared(self) -> _Verification:
        if self._verification is None:
            expected = "one that init_forward_metadata prepared"
            raise InvalidInput("batch", got="a verify step", expected=expected)
        return self._verification

    def _among_drafts(
        self, call: AttentionCall, step: _Verification
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of the drafts to each other, [B * d, Hq, Dv] and its LSE [B * d, Hq], float32.

        The pool's K and V are read, because the pool may have rounded them.
        """
        layer, (rows, width) = call.layer, step.rows.visible.shape
        q = call.q if call.q_rope is None else torch.cat((call.q, call.q_rope), -1)
        k, v = self._kv_of_drafts(layer, step.slots, is_latent=call.q_rope is not None)
        heads = k.shape[1]
        q = q.float().reshape(rows // width, width, heads, q.shape[1] // heads, q.shape[2])
        k, v = (each.reshape(rows // width, width, *each.shape[1:]) for each in (k, v))
        visible = step.rows.visible.view(rows // width, 1, 1, width, width)
        logits = torch.einsum("bihgc,bjhc->bhgij", q, k) * layer.scaling
        if layer.logit_cap > 0:
            logits = torch.tanh(logits / layer.logit_cap) * layer.logit_cap
        logits = torch.where(visible, logits, -torch.inf)
        lse = logits.logsumexp(-1, keepdim=True)
        out = torch.einsum("bhgij,bjhc->bihgc", torch.exp(logits - lse), v)
        shape = call.q.shape[:2]
        lse = lse.squeeze(-1).permute(0, 3, 1, 2).reshape(shape)
        return out.reshape(*shape, layer.v_head_dim), lse

    def _kv_of_drafts(
        self, layer: LayerSpec, slots: torch.Tensor, *, is_latent: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K [B * d, Hkv, D] and V [B * d, Hkv, Dv], float32 and without the pool's scales."""
        pool = self.context.token_to_kv_pool
        slots = pool.translate(slots, layer.layer_id)
        k_scale, v_scale = pool.read_scales(layer.k_scale, layer.v_scale)
        k = gather_rows(pool.get_key_buffer(layer.layer_id), slots).float() * k_scale
        if is_latent:
            return k, k[..., : layer.v_head_dim]
        return k, gather_rows(pool.get_value_buffer(layer.layer_id), slots).float() * v_scale


def prefix_context(context: BackendContext) -> BackendContext:
    """The context of the backend inside a `TreeAttnBackend`: room for a request a draft token.

    Raises InvalidInput for a request without `spec_draft_tokens`, and for layers of which parts
    cannot be merged by LSE.
    """
    drafts = context.request.spec_draft_tokens
    if drafts is None:
        raise InvalidInput("spec_draft_tokens", got=None, expected="draft tokens of a verify step")
    for layer in context.layers:
        limited = layer.sliding_window_size >= 0 or layer.attention_chunk_size > 0
        if layer.kind not in ("mha", "mla") or limited or layer.is_cross_attention:
            expected = "self attention of kind mha or mla, without windows and chunks"
            raise InvalidInput("layers", got=f"layer {layer.layer_id}", expected=expected)
    return replace(
        context,
        request=context.request.for_prefixes(),
        max_batch_size=context.max_batch_size * drafts,
        # Decode steps over prefixes contradict the request table, and the step was checked whole
        debug=False,
    )


def _drafts(batch: ForwardBatch) -> int:
    """d, the draft tokens of each request."""
    if batch.spec_info is None:
        raise InvalidInput("spec_info", got=None, expected="the drafts of a verify step")
    return batch.spec_info.draft_token_num


def _rows(batch: ForwardBatch) -> _Rows:
    """An empty prefix gets a token, because each request of a decode step has one. Its share of the
    answer is dropped."""
    drafts = _drafts(batch)
    lens = batch.seq_lens.clamp(min=1).repeat_interleave(drafts)
    return _Rows(
        req_pool_indices=batch.req_pool_indices.repeat_interleave(drafts),
        lens=lens,
        positions=lens.long() - 1,
        sees_prefix=(batch.seq_lens > 0).repeat_interleave(drafts),
        visible=_visible(batch).reshape(-1, drafts),
    )


def _visible(batch: ForwardBatch) -> torch.Tensor:
    """[B, d, d] bool: the drafts that each draft sees, from the last d columns of its mask."""
    spec, drafts, device = batch.spec_info, _drafts(batch), batch.seq_lens.device
    if spec is None or spec.custom_mask is None or spec.mask_indptr is None:
        causal = torch.ones(drafts, drafts, dtype=torch.bool, device=device).tril()
        return causal.expand(batch.batch_size, drafts, drafts)
    order = torch.arange(drafts, device=device)
    prefix = batch.seq_lens.long().view(-1, 1, 1)
    starts = spec.mask_indptr[: batch.batch_size].long().view(-1, 1, 1)
    places = starts + order.view(-1, 1) * (prefix + drafts) + prefix + order
    return spec.custom_mask[places]
