"""The reference for some tokens of one request.

`reference.attention` computes whole layers. This module reads only the keys that these tokens see,
so that checking a few of them is cheap in a step of any size.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    """The reference for some tokens of a request and some of its query heads."""

    out: torch.Tensor
    """[n, H, Dv] float64."""
    lse: torch.Tensor
    """[n, H] float64."""
    scale: torch.Tensor
    """[n, H]: the magnitude of the summed values, which is the sum of weight * |V| over the keys,
    largest over the dims."""


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
    slots: torch.Tensor,
    pool: KVPool,
    request: RequestView,
    offsets: Sequence[int],
    heads: range,
    q: torch.Tensor,
) -> Expected:
    """Attention of some tokens and query heads over the K and V of the pool or of the call.

    Only keys that one of the tokens sees are read. slots: the request's, [at least its tokens],
    those of its encoder first. offsets: indices among the request's n new tokens, ascending. heads:
    query heads that share a KV head. q: [n, H, D] of these heads, including MLA's rotary part; it
    is a separate argument so that a caller can round it.
    """
    layer, places = call.layer, torch.tensor(offsets, device=call.q.device)
    keep = _seen(call, batch, request, places)
    seen = keep.any(0).nonzero().flatten()
    kv_head = heads.start // (layer.tp_q_head_num // layer.tp_k_head_num)
    if call.has_own_kv:
        keys, values = _from_call(call, request, seen, kv_head)
    else:
        start = 0 if layer.is_cross_attention else request.encoder
        keys, values = _from_pool(layer, pool, slots[start + seen], kv_head)
    cached = 0 if call.has_own_kv else request.cached
    place, num_keys, of_heads = cached + places, keep.shape[1], slice(heads.start, heads.stop)
    keep = keep[:, seen]
    values = torch.cat([values, values.abs()], dim=-1)
    bias = None
    if layer.alibi_slopes is not None:
        bias = alibi_bias(layer.alibi_slopes[of_heads], place, num_keys)[..., seen]
    if layer.relative_bias is not None:
        table = layer.relative_bias[of_heads]
        bias = relative_bias(table, place, num_keys, causal=layer.is_causal)[..., seen]
    if layer.kind == "dual_chunk":
        meets = chunks_before(place, num_keys, layer.dual_chunk_len)[:, seen]
        keys, values, keep = expand_dual_chunk(keys, values, keep, meets)
    out, lse = dense_attention(
        q,
        keys,
        values,
        keep,
        scaling=layer.scaling,
        logit_cap=layer.logit_cap,
        bias=bias,
        sinks=None if layer.sinks is None else layer.sinks[of_heads],
    )
    result, magnitude = out.chunk(2, dim=-1)
    return Expected(out=result, lse=lse, scale=magnitude.amax(-1))


def _seen(
    call: AttentionCall, batch: ForwardBatch, request: RequestView, offsets: torch.Tensor
) -> torch.Tensor:
    """The keys of the request's sequence that each of the tokens sees, [n, keys] bool."""
    layer, device = call.layer, call.q.device
    if layer.is_cross_attention:
        return torch.ones((len(offsets), request.encoder), dtype=torch.bool, device=device)
    cached = 0 if call.has_own_kv else request.cached
    num_keys, tokens = cached + request.new, request.first_token + offsets
    mask = None
    if batch.spec_info is not None and batch.spec_info.custom_mask is not None:
        rows = slice(request.mask_start, request.mask_start + request.new * num_keys)
        mask = batch.spec_info.custom_mask[rows].view(request.new, num_keys)[offsets]
    if layer.kind == "mla" and batch.topk_indices is not None:
        mask = topk_mask(batch.topk_indices[tokens], num_keys)
    place = cached + offsets
    trees, key_positions = drafts_seen(batch), None
    if trees is not None:
        depths = trees[request.index].sum(1) - 1
        key_positions = torch.cat([torch.arange(cached, device=device), cached + depths])
        place = key_positions[cached + offsets]
        mask = torch.ones((len(offsets), num_keys), dtype=torch.bool, device=device)
        mask[:, cached:] = trees[request.index, offsets]
    item_starts, shared_prefix = None, 0
    if batch.multi_item is not None:
        item_starts = place - batch.multi_item.token_pos_in_items[tokens]
        shared_prefix = int(batch.multi_item.prefix_lens[request.index])
    return visibility(
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
