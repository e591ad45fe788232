"""The reference for one token and one query head at a time.

`reference.attention` computes whole layers. This module reads only the keys that one token sees,
so that checking a few points is cheap in a step of any size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attnmux.core import AttentionCall, ForwardBatch, KVPool, LayerSpec
from attnmux.testing.reference.dense import (
    alibi_bias,
    chunks_before,
    dense_attention,
    drafts_seen,
    expand_dual_chunk,
    relative_bias,
    topk_mask,
    visibility,
)
from attnmux.testing.reference.wide_rows import wide_rows


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestView:
    """One request of a step, on the host. Padding requests have no view."""

    index: int
    """Index in the batch."""
    row: int
    """Index in the request table."""
    new: int
    cached: int
    encoder: int
    """Encoder tokens, which precede the request's own in its row."""
    encoder_start: int
    """First row of its encoder tokens in the `k` of a cross-attention call."""
    first_token: int
    mask_start: int
    """Start of its part of a flat custom mask."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Expected:
    """The reference at one point."""

    out: torch.Tensor
    """[Dv] float64."""
    lse: float
    scale: float
    """The magnitude of the summed values: the sum of weight * |V| over the keys, largest over
    the dims."""


def requests_of(batch: ForwardBatch) -> tuple[RequestView, ...]:
    """The step's requests, without padding. Synchronises with the device."""
    size = batch.batch_size
    if batch.forward_mode.is_extend():
        assert batch.extend_seq_lens is not None
        assert batch.extend_prefix_lens is not None
        new, cached = batch.extend_seq_lens.tolist(), batch.extend_prefix_lens.tolist()
    else:
        new, cached = [1] * size, (batch.seq_lens - 1).tolist()
    encoder = [0] * size if batch.encoder_lens is None else batch.encoder_lens.tolist()
    views = []
    token = mask = encoded = 0
    for index, row in enumerate(batch.req_pool_indices.tolist()):
        view = RequestView(
            index=index,
            row=row,
            new=new[index],
            cached=cached[index],
            encoder=encoder[index],
            encoder_start=encoded,
            first_token=token,
            mask_start=mask,
        )
        if row:
            views.append(view)
        token += view.new
        mask += view.new * (view.cached + view.new)
        encoded += view.encoder
    return tuple(views)


def expected_at(
    call: AttentionCall,
    batch: ForwardBatch,
    req_to_token: torch.Tensor,
    pool: KVPool,
    request: RequestView,
    offset: int,
    head: int,
    q: torch.Tensor,
) -> Expected:
    """Attention of one token and one query head over the K and V of the pool or of the call.

    offset: the token's index among the request's new ones. q: [D] of the head, including MLA's
    rotary part; it is a separate argument so that a caller can round it.
    """
    layer = call.layer
    seen = _seen(call, batch, request, offset)
    kv_head = head // (layer.tp_q_head_num // layer.tp_k_head_num)
    if call.has_own_kv:
        keys, values = _from_call(call, request, seen, kv_head)
    else:
        start = 0 if layer.is_cross_attention else request.encoder
        slots = req_to_token[request.row, start + seen]
        keys, values = _from_pool(layer, pool, slots, kv_head)
    keep = torch.ones((1, len(seen)), dtype=torch.bool, device=q.device)
    values = torch.cat([values, values.abs()], dim=-1)
    cached = 0 if call.has_own_kv else request.cached
    place, num_keys = torch.tensor([cached + offset], device=q.device), cached + request.new
    bias = None
    if layer.alibi_slopes is not None:
        bias = alibi_bias(layer.alibi_slopes[head : head + 1], place, num_keys)[..., seen]
    if layer.relative_bias is not None:
        table = layer.relative_bias[head : head + 1]
        bias = relative_bias(table, place, num_keys, causal=layer.is_causal)[..., seen]
    if layer.kind == "dual_chunk":
        meets = chunks_before(place, num_keys, layer.dual_chunk_len)[:, seen]
        keys, values, keep = expand_dual_chunk(keys, values, keep, meets)
    out, lse = dense_attention(
        q.view(1, 1, -1),
        keys,
        values,
        keep,
        scaling=layer.scaling,
        logit_cap=layer.logit_cap,
        bias=bias,
        sinks=None if layer.sinks is None else layer.sinks[head : head + 1],
    )
    result, magnitude = out[0, 0].chunk(2)
    return Expected(out=result, lse=float(lse), scale=float(magnitude.amax()))


def _seen(
    call: AttentionCall, batch: ForwardBatch, request: RequestView, offset: int
) -> torch.Tensor:
    """The keys of the request's sequence that the token sees, [n] int64, ascending."""
    layer, device = call.layer, call.q.device
    if layer.is_cross_attention:
        return torch.arange(request.encoder, device=device)
    cached = 0 if call.has_own_kv else request.cached
    num_keys, token = cached + request.new, request.first_token + offset
    mask = None
    if batch.spec_info is not None and batch.spec_info.custom_mask is not None:
        start = request.mask_start + offset * num_keys
        mask = batch.spec_info.custom_mask[start : start + num_keys]
    if layer.kind == "mla" and batch.topk_indices is not None:
        mask = topk_mask(batch.topk_indices[token : token + 1], num_keys)
    place = torch.tensor([cached + offset], device=device)
    trees, key_positions = drafts_seen(batch), None
    if trees is not None:
        depths = trees[request.index].sum(1) - 1
        key_positions = torch.cat([torch.arange(cached, device=device), cached + depths])
        place = key_positions[cached + offset :][:1]
        mask = torch.ones(num_keys, dtype=torch.bool, device=device)
        mask[cached:] = trees[request.index, offset]
    item_starts, shared_prefix = None, 0
    if batch.multi_item is not None:
        item_starts = place - batch.multi_item.token_pos_in_items[token]
        shared_prefix = int(batch.multi_item.prefix_lens[request.index])
    keep = visibility(
        place,
        num_keys,
        key_positions=key_positions,
        causal=layer.is_causal,
        window=layer.sliding_window_size,
        chunk=layer.attention_chunk_size,
        custom_mask=mask,
        item_starts=item_starts,
        shared_prefix=shared_prefix,
    )
    return keep[0].nonzero().flatten()


def _from_call(
    call: AttentionCall, request: RequestView, seen: torch.Tensor, kv_head: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """K [n, 1, D] and V [n, 1, Dv] in float64, for a call whose k and v are all the keys."""
    assert call.k is not None
    cross = call.layer.is_cross_attention
    rows = seen + (request.encoder_start if cross else request.first_token)
    keys = call.k[rows, kv_head : kv_head + 1].double()
    if call.k_rope is not None:
        return torch.cat([keys, call.k_rope[rows].double()], dim=-1), keys
    assert call.v is not None
    return keys, call.v[rows, kv_head : kv_head + 1].double()


def _from_pool(
    layer: LayerSpec, pool: KVPool, slots: torch.Tensor, kv_head: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """K [n, 1, D] and V [n, 1, Dv] of slots of the request table, in float64 and de-quantised."""
    slots = pool.translate(slots.long(), layer.layer_id)
    k_scale, v_scale = pool.read_scales(layer.k_scale, layer.v_scale)
    of_head = slice(kv_head, kv_head + 1)
    keys, values = (each[:, of_head] for each in wide_rows(pool, layer.layer_id, slots))
    return keys.double() * k_scale, values.double() * v_scale
