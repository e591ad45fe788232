"""The smallest step of each phase: it compiles a library's kernels and shows whether they run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

import torch

from attnmux.core.contract.backend import AttentionBackend
from attnmux.core.contract.batch import ForwardBatch, MultiItem
from attnmux.core.contract.context import BackendContext
from attnmux.core.contract.dtypes import torch_dtype
from attnmux.core.contract.layer import LayerSpec
from attnmux.core.contract.linear.backend import LinearAttentionBackend
from attnmux.core.contract.linear.convolutions import ShortConvolutions
from attnmux.core.contract.linear.layer import ConvCall, LinearLayerSpec
from attnmux.core.contract.linear.states import StatePool
from attnmux.core.contract.mode import ForwardMode
from attnmux.core.contract.spec import SpecInput
from attnmux.core.facts.errors import InvalidInput

B = TypeVar("B", AttentionBackend, LinearAttentionBackend)

CHANNELS, TAPS = 16, 4
"""Size of the convolution that is rehearsed."""

MODES = {
    "extend": ForwardMode.EXTEND,
    "decode": ForwardMode.DECODE,
    "verify": ForwardMode.TARGET_VERIFY,
    "draft": ForwardMode.DRAFT_EXTEND,
    "encoder": ForwardMode.EXTEND,
}


def attend_all(backend: AttentionBackend, batch: ForwardBatch) -> None:
    """Attend to a step's tokens, once for each kind of layer.

    K and V come with the call, as a model's do, and are written to the reserved page. Layers that
    the backend refuses are left out: another backend serves them.
    """
    for layer in _distinct_layers(backend.context):
        with suppress(InvalidInput):
            _attend(backend, layer, batch)


def rehearse(
    backend: B,
    run: Callable[[B, ForwardBatch], None] = attend_all,  # type: ignore[assignment]  # B's default
) -> None:
    """Run one token, or a request's drafts, in each phase of the request.

    run: calls the layers of a prepared step. Phases that the backend refuses are left out: another
    backend serves them. Raises what the library raises.
    """
    for batch in smallest_batches(backend.context):
        with suppress(InvalidInput):
            backend.init_forward_metadata(batch)
            run(backend, batch)
    backend.init_forward_metadata(_batch(backend.context, ForwardMode.IDLE, cached=0, new=0))


def rehearse_convolutions(
    make: Callable[[StatePool], ShortConvolutions], context: BackendContext
) -> ShortConvolutions:
    """Run a convolution of one token in each phase of the request, over states of its own.

    Returns those over the context's states. Raises InvalidInput for a context without
    `linear_states`, and errors of a library or compiler.
    """
    states = StatePool.of(context)
    layer = LinearLayerSpec(layer_id=0, kind="conv", conv_dims=(CHANNELS,), conv_size=TAPS)
    drafts = context.request.spec_draft_tokens or 1
    convolutions = make(states.alike([layer], draft_tokens=drafts))
    weight = torch.zeros((CHANNELS, TAPS), dtype=states.conv_dtype, device=states.device)
    for batch in smallest_batches(context):
        x = weight.new_zeros((batch.num_tokens, CHANNELS))
        call = ConvCall(x, weight, None, True, layer, 0, torch.empty_like(x))
        if batch.forward_mode.is_target_verify():
            convolutions.verify(call, batch)
        elif not batch.forward_mode.is_draft_extend():
            if batch.forward_mode.is_extend():
                convolutions.prepare(batch)
            convolutions.run(call, batch)
    return make(states)


def smallest_batches(context: BackendContext) -> Iterator[ForwardBatch]:
    """One request of one token, or of its drafts, in each phase of the request.

    It is row 0 of the request table, whose slots are padding's. If layers hold no keys in the
    pool, an extend step without a prefix follows; if the request has many items, one with items.
    """
    drafts = context.request.spec_draft_tokens or 1
    for phase in context.request.phases:
        mode = MODES[phase]
        new = drafts if mode.is_target_verify() else 1
        yield _batch(context, mode, cached=0 if phase == "encoder" else 1, new=new)
        if phase == "extend" and any(_brings_keys(layer, context) for layer in context.layers):
            yield _batch(context, mode, cached=0, new=new)
        if phase == "extend" and context.request.multi_item:
            batch = _batch(context, mode, cached=1, new=new)
            items = MultiItem(
                prefix_lens=batch.seq_lens - new, token_pos_in_items=batch.seq_lens.new_zeros(new)
            )
            yield replace(batch, multi_item=items)


def _batch(context: BackendContext, mode: ForwardMode, *, cached: int, new: int) -> ForwardBatch:
    device, size = context.device, min(new, 1)
    prefix = torch.full((size,), cached, dtype=torch.int32)
    added = torch.full((size,), new, dtype=torch.int32)
    lens = prefix if mode.is_target_verify() else prefix + added
    places = torch.zeros(new, dtype=torch.int64, device=device)
    extends = mode.is_extend()
    has_encoder = any(layer.is_cross_attention for layer in context.layers)
    spec_info = None
    if mode.is_target_verify():
        mask = None
        if context.request.custom_mask:
            rows = torch.ones((new, cached + new), dtype=torch.bool, device=device)
            mask = rows.tril(cached).flatten()
        spec_info = SpecInput(draft_token_num=new, custom_mask=mask)
    return ForwardBatch(
        forward_mode=mode,
        batch_size=size,
        req_pool_indices=places[:size],
        seq_lens=lens.to(device),
        seq_lens_cpu=lens,
        out_cache_loc=places,
        positions=places,
        extend_seq_lens=added.to(device) if extends else None,
        extend_seq_lens_cpu=added if extends else None,
        extend_prefix_lens=prefix.to(device) if extends else None,
        extend_prefix_lens_cpu=prefix if extends else None,
        extend_num_tokens=new if extends else None,
        encoder_lens=torch.ones(size, dtype=torch.int32, device=device) if has_encoder else None,
        spec_info=spec_info,
        topk_indices=places.int().unsqueeze(1) if context.request.kind == "nsa" else None,
    )


def _brings_keys(layer: LayerSpec, context: BackendContext) -> bool:
    """Whether the layer's K and V come with the call: the pool does not store them."""
    stored = layer.layer_id in context.token_to_kv_pool.layer_ids
    return not stored or not (layer.is_causal or layer.is_cross_attention)


def _distinct_layers(context: BackendContext) -> list[LayerSpec]:
    """One layer of each kind that a library may have a kernel of its own for."""
    layers_by_kind: dict[object, LayerSpec] = {}
    for layer in context.layers:
        kind = (
            layer.kind,
            layer.tp_q_head_num,
            layer.tp_k_head_num,
            layer.qk_head_dim,
            layer.v_head_dim,
            layer.sliding_window_size >= 0,
            layer.logit_cap,
            layer.sinks is None,
            layer.alibi_slopes is None,
            None if layer.relative_bias is None else layer.relative_reach,
            layer.is_cross_attention,
            _brings_keys(layer, context),
        )
        layers_by_kind.setdefault(kind, layer)
    return list(layers_by_kind.values())


def _attend(backend: AttentionBackend, layer: LayerSpec, batch: ForwardBatch) -> None:
    """Call the layer, with LSE too if the request asks for it."""
    context = backend.context
    brings_keys = _brings_keys(layer, context)
    if brings_keys and (batch.forward_mode is not ForwardMode.EXTEND or _has_prefix(batch)):
        return
    dtype = torch_dtype(context.request.dtype or "bfloat16")
    rows, rope = batch.num_tokens, layer.qk_rope_head_dim

    def zeros(heads: int, dim: int, rows: int = rows) -> torch.Tensor:
        return torch.zeros((rows, heads, dim), dtype=dtype, device=context.device)

    q, k, v, k_rope = zeros(layer.tp_q_head_num, layer.query_dim), None, None, None
    if brings_keys or not layer.is_cross_attention:
        keys = batch.batch_size if layer.is_cross_attention else rows  # an encoder token each
        k = zeros(layer.tp_k_head_num, layer.qk_head_dim - rope, keys)
        v = None if rope else zeros(layer.tp_v_head_num, layer.v_head_dim, keys)
        k_rope = zeros(1, rope) if rope else None
    q_rope = zeros(layer.tp_q_head_num, rope) if rope else None
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=context.device)
    for wanted in (None, lse) if context.request.lse else (None,):
        backend.forward(
            q, k, v, layer, batch, not brings_keys, q_rope=q_rope, k_rope=k_rope, lse=wanted
        )


def _has_prefix(batch: ForwardBatch) -> bool:
    prefix = batch.extend_prefix_lens_cpu
    return prefix is not None and bool(prefix.any())
