"""Checks of a batch's values. They synchronise with the device, so only `debug` runs them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attnmux.core.errors import InvalidInput
from attnmux.core.indices import extend_positions

if TYPE_CHECKING:
    from attnmux.core.batch import ForwardBatch
    from attnmux.core.context import BackendContext


def check_batch(context: BackendContext, batch: ForwardBatch) -> None:
    """Refuse a batch whose indices or lengths point outside the pools or contradict each other.

    Raises InvalidInput naming the field, the offending range and what was expected.
    """
    table = context.req_to_token_pool.req_to_token
    slots = context.token_to_kv_pool.num_slots
    _within("req_pool_indices", batch.req_pool_indices, table.shape[0])
    _within("out_cache_loc", batch.out_cache_loc, slots)
    _within("req_to_token", table[batch.req_pool_indices], slots)
    lens = batch.seq_lens
    _within("seq_lens", lens, context.max_context_len + 1)
    if batch.encoder_lens is not None:
        _within("encoder_lens", batch.encoder_lens, context.max_context_len + 1)
        lens = lens + batch.encoder_lens
    if batch.encoder_out_cache_loc is not None:
        _within("encoder_out_cache_loc", batch.encoder_out_cache_loc, slots)
    if batch.forward_mode.is_target_verify() and batch.extend_seq_lens is not None:
        lens = lens + batch.extend_seq_lens
    _within("seq_lens", lens, context.max_context_len + 1)
    for field in ("seq_lens", "extend_seq_lens", "extend_prefix_lens"):
        _check_mirror(field, getattr(batch, field), getattr(batch, f"{field}_cpu"))
    if batch.forward_mode.is_extend():
        _check_extend(batch)
    elif batch.forward_mode.is_decode() and batch.num_tokens != batch.batch_size:
        raise InvalidInput(
            "out_cache_loc",
            came=f"{batch.num_tokens} slots",
            expected=f"{batch.batch_size}, one a decoding request",
        )
    _check_keys(context, batch, lens)
    if batch.topk_indices is not None:
        _check_picks(batch, batch.topk_indices)


def _check_keys(context: BackendContext, batch: ForwardBatch, ends: torch.Tensor) -> None:
    """Refuse a request whose keys lie in the reserved page, of their layers' pool.

    ends: [B], columns of each request's row that hold slots, the encoder's included. Padding, row
    0, may read there.
    """
    pool = context.token_to_kv_pool
    slots = context.req_to_token_pool.req_to_token[batch.req_pool_indices]
    columns = torch.arange(slots.shape[1], device=slots.device)
    held = (columns < ends.unsqueeze(1)) & (batch.req_pool_indices > 0).unsqueeze(1)
    _outside_reserved("req_to_token", slots, held, pool.page_size)
    starts = torch.zeros_like(ends) if batch.encoder_lens is None else batch.encoder_lens
    new = 1 if batch.extend_seq_lens is None else batch.extend_seq_lens
    queries = (ends - starts - new).clamp(min=0)
    groups = {
        (
            pool.group_of(layer.layer_id),
            layer.sliding_window_size,
            layer.attention_chunk_size,
        ): layer
        for layer in context.layers
        if layer.is_causal and not layer.is_cross_attention
    }
    for layer in groups.values():
        first = torch.zeros_like(queries)
        if layer.sliding_window_size >= 0:
            first = (queries - layer.sliding_window_size).clamp(min=0)
        if layer.attention_chunk_size:
            first = first.maximum(queries - queries % layer.attention_chunk_size)
        seen = held & (columns >= (starts + first).unsqueeze(1))
        translated = pool.translate(slots, layer.layer_id)
        _outside_reserved(f"req_to_token, layer {layer.layer_id}", translated, seen, pool.page_size)


def _outside_reserved(field: str, slots: torch.Tensor, held: torch.Tensor, page_size: int) -> None:
    reserved = (held & (slots < page_size)).nonzero()
    if reserved.numel():
        row, column = reserved[0].tolist()
        raise InvalidInput(
            field,
            came=f"slot {int(slots[row, column])} at column {column} of request {row} in the batch",
            expected=f"slots from {page_size} on: the first page is padding's, and holds no keys",
        )


def _check_extend(batch: ForwardBatch) -> None:
    if batch.extend_seq_lens is None or batch.extend_prefix_lens is None:
        raise InvalidInput(
            "extend_seq_lens", came=None, expected="new and cached lengths in an extend step"
        )
    _within("extend_seq_lens", batch.extend_seq_lens, batch.num_tokens + 1)
    total = int(batch.extend_seq_lens.sum())
    if total > batch.num_tokens:
        raise InvalidInput(
            "extend_seq_lens", came=f"{total} tokens", expected=f"at most {batch.num_tokens}"
        )
    ends = batch.extend_prefix_lens
    if bool((ends < 0).any()):
        raise InvalidInput("extend_prefix_lens", came=ends.tolist(), expected="at least 0")
    if not batch.forward_mode.is_target_verify():
        ends = ends + batch.extend_seq_lens
    if not torch.equal(ends, batch.seq_lens):
        raise InvalidInput(
            "seq_lens", came=batch.seq_lens.tolist(), expected=f"prefix + new = {ends.tolist()}"
        )
    _check_mask(batch, batch.extend_seq_lens, batch.extend_prefix_lens)
    items = batch.multi_item
    if items is not None and items.token_pos_in_items.shape[0] < total:
        raise InvalidInput(
            "multi_item.token_pos_in_items",
            came=f"{items.token_pos_in_items.shape[0]} values",
            expected=f"{total}, one a new token",
        )


def _check_picks(batch: ForwardBatch, picks: torch.Tensor) -> None:
    """Refuse keys that do not come before their token, and keys that are picked twice.

    Behind the last request's tokens nothing is looked at.
    """
    new, cached = batch.extend_seq_lens, batch.extend_prefix_lens
    if new is None or cached is None:
        last = batch.seq_lens.long() - 1
    else:
        last = extend_positions(cached, new)
    picks = picks[: len(last)].long()
    wrong = (picks < -1) | (picks > last.clamp(min=-1).unsqueeze(1))
    if bool(wrong.any()):
        row, column = wrong.nonzero()[0].tolist()
        raise InvalidInput(
            "topk_indices",
            came=f"key {int(picks[row, column])} for token {row}",
            expected=f"-1, or up to {int(last[row])}, the token's own place in its sequence",
        )
    ordered = picks.sort(dim=1).values
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    if bool(twice.any()):
        row, column = twice.nonzero()[0].tolist()
        raise InvalidInput(
            "topk_indices",
            came=f"key {int(ordered[row, column])} twice for token {row}",
            expected="each key once: a kernel would count it twice",
        )


def _check_mask(batch: ForwardBatch, new: torch.Tensor, cached: torch.Tensor) -> None:
    mask = None if batch.spec_info is None else batch.spec_info.custom_mask
    if mask is None:
        return
    size = int((new.long() * (cached + new)).sum())
    if mask.numel() != size:
        raise InvalidInput(
            "spec_info.custom_mask",
            came=f"{mask.numel()} values",
            expected=f"{size}, new tokens * keys of each request",
        )


def _check_mirror(field: str, values: torch.Tensor | None, mirror: torch.Tensor | None) -> None:
    if mirror is not None and (values is None or not torch.equal(values.cpu(), mirror)):
        raise InvalidInput(
            f"{field}_cpu",
            came=mirror.tolist(),
            expected=f"{None if values is None else values.tolist()}, as on the device",
        )


def _within(field: str, values: torch.Tensor, bound: int) -> None:
    if values.numel() and (int(values.min()) < 0 or int(values.max()) >= bound):
        raise InvalidInput(
            field,
            came=f"values from {int(values.min())} to {int(values.max())}",
            expected=f"0 to {bound - 1}",
        )
