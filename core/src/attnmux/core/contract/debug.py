"""Checks of types, values, devices and strides. Most synchronise; they run only in debug mode."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from types import UnionType
from typing import get_args, get_origin, get_type_hints

import torch

from attnmux.core.contract.arguments import check_device
from attnmux.core.contract.batch import ForwardBatch, MultiItem
from attnmux.core.contract.call import AttentionCall
from attnmux.core.contract.context import BackendContext
from attnmux.core.contract.spec import SpecInput
from attnmux.core.contract.tree_masks import check_trees
from attnmux.core.facts.checks import refusal
from attnmux.core.facts.errors import InvalidInput


def check_types(argument: str, record: object, kind: type, *, prefix: str = "") -> None:
    """Refuse a record that is not of `kind`, and fields of other types than it declares, those of
    its own records included.

    Raises InvalidInput with the argument, or with the field after the prefix.
    """
    if not isinstance(record, kind):
        raise refusal(argument, record, f"a {kind.__name__}")
    for name, kinds in _field_types(kind).items():
        value, path = getattr(record, name), f"{prefix}{name}"
        is_flag = isinstance(value, bool) and bool not in kinds
        if is_flag or not isinstance(value, kinds):
            words = ["None" if type_ is type(None) else type_.__name__ for type_ in kinds]
            raise refusal(path, value, f"one of type {' or '.join(words)}")
        if isinstance(value, (SpecInput, MultiItem)):
            check_types(path, value, type(value), prefix=f"{path}.")
        for part in value if isinstance(value, tuple) else ():
            check_types(path, part, ForwardBatch, prefix=f"{path}.")


@cache
def _field_types(kind: type) -> Mapping[str, tuple[type, ...]]:
    """The types that the annotation of each field admits."""
    hints = get_type_hints(kind, localns={"torch": torch, "SpecInput": SpecInput})
    return {
        name: tuple(
            get_origin(member) or member
            for member in (get_args(hint) if isinstance(hint, UnionType) else (hint,))
        )
        for name, hint in hints.items()
    }


def check_tensors(context: BackendContext, call: AttentionCall) -> None:
    """Refuse a call on another device than the pools', and results whose elements overlap.

    Raises InvalidInput with the argument.
    """
    device = context.req_to_token_pool.req_to_token.device
    check_device("q", call.q, device)
    for name, tensor in (("out", call.out), ("lse", call.lse)):
        if tensor is not None and any(
            stride == 0 and size > 1
            for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
        ):
            got = f"strides {tensor.stride()} for shape {tuple(tensor.shape)}"
            raise InvalidInput(name, got=got, expected="memory of its own for each element")


def _check_devices(context: BackendContext, batch: ForwardBatch) -> None:
    device = context.req_to_token_pool.req_to_token.device
    for field in fields(batch):
        value = getattr(batch, field.name)
        expected = torch.device("cpu") if field.name.endswith("_cpu") else device
        if isinstance(value, torch.Tensor):
            check_device(field.name, value, expected)


def check_batch(context: BackendContext, batch: ForwardBatch) -> None:
    """Refuse a batch whose indices or lengths point outside the pools or contradict each other.

    `check_fields` comes first; `check_picks` follows once the indexer has written its picks.
    Raises InvalidInput with the field, the offending values and the expected ones.
    """
    _check_devices(context, batch)
    table = context.req_to_token_pool.req_to_token
    slots, max_len = context.token_to_kv_pool.num_slots, context.max_context_len + 1
    _within("req_pool_indices", batch.req_pool_indices, table.shape[0])
    _within("out_cache_loc", batch.out_cache_loc, slots)
    _within("req_to_token", table[batch.req_pool_indices], slots)
    lens = batch.seq_lens
    _within("seq_lens", lens, max_len)
    if batch.encoder_lens is not None:
        _within("encoder_lens", batch.encoder_lens, max_len)
        lens = lens + batch.encoder_lens
    if batch.encoder_out_cache_loc is not None:
        _within("encoder_out_cache_loc", batch.encoder_out_cache_loc, slots)
    if batch.forward_mode.is_target_verify() and batch.extend_seq_lens is not None:
        lens = lens + batch.extend_seq_lens
    _within("seq_lens", lens, max_len)
    for field in ("seq_lens", "extend_seq_lens", "extend_prefix_lens"):
        _check_mirror(field, getattr(batch, field), getattr(batch, f"{field}_cpu"))
    if batch.forward_mode.is_extend():
        _check_extend(batch)
    total = int(batch.seq_lens.sum())
    if batch.seq_lens_sum not in (None, total):
        raise InvalidInput("seq_lens_sum", got=batch.seq_lens_sum, expected=f"{total}, their sum")
    _check_keys(context, batch, lens)
    _check_new_slots(table, batch)


def _places(cached: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """[T] int64: the place of each new token in its sequence."""
    new = new.long()
    firsts = (cached - (new.cumsum(0) - new)).repeat_interleave(new)
    return firsts + torch.arange(firsts.shape[0], device=new.device)


def _check_new_slots(table: torch.Tensor, batch: ForwardBatch) -> None:
    """Refuse new tokens that are written elsewhere than the request table says.

    Padding, which has row 0, and requests without keys write to slot 0.
    """
    rows, starts = batch.req_pool_indices, batch.encoder_lens
    columns = batch.seq_lens.long() - 1
    if starts is None:
        starts = torch.zeros_like(batch.seq_lens)
    if batch.extend_seq_lens is not None and batch.extend_prefix_lens is not None:
        new = batch.extend_seq_lens.long()
        columns = _places(batch.extend_prefix_lens, batch.extend_seq_lens)
        rows, starts = rows.repeat_interleave(new), starts.repeat_interleave(new)
    slots = batch.out_cache_loc[: len(columns)]
    known = (rows > 0) & (columns >= 0)
    stored = table[rows, (columns + starts).clamp(min=0)]
    wrong = (known & (stored != slots)).nonzero()
    if wrong.numel():
        token = int(wrong[0])
        raise InvalidInput(
            "out_cache_loc",
            got=f"slot {int(slots[token])} for token {token}",
            expected=f"slot {int(stored[token])}, as in the request table",
        )


def _check_keys(context: BackendContext, batch: ForwardBatch, ends: torch.Tensor) -> None:
    """Refuse a request whose keys lie in the reserved page of their layer's pool.

    ends: [B], columns of each request's row that hold slots, the encoder's included. Padding,
    which has row 0, may read the reserved page.
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
    place = _first_place(held & (slots < page_size))
    if place is not None:
        row, column = place
        raise InvalidInput(
            field,
            got=f"slot {int(slots[row, column])} at column {column} of request {row} in the batch",
            expected=f"slots from {page_size} on: the first page is reserved for padding",
        )


def _check_extend(batch: ForwardBatch) -> None:
    new, cached = batch.extend_lens()
    _within("extend_seq_lens", new, batch.num_tokens + 1)
    total = int(new.sum())
    if total > batch.num_tokens:
        expected = f"at most {batch.num_tokens}"
        raise InvalidInput("extend_seq_lens", got=f"{total} tokens", expected=expected)
    if bool((cached < 0).any()):
        raise InvalidInput("extend_prefix_lens", got=cached.tolist(), expected="at least 0")
    ends = cached if batch.forward_mode.is_target_verify() else cached + new
    if not torch.equal(ends, batch.seq_lens):
        expected = f"prefix + new = {ends.tolist()}"
        raise InvalidInput("seq_lens", got=batch.seq_lens.tolist(), expected=expected)
    if batch.spec_info is not None and batch.spec_info.custom_mask is not None:
        size = int((new.long() * (cached + new)).sum())
        mask = batch.spec_info.custom_mask
        rule = "new tokens * keys of each request"
        _check_count("spec_info.custom_mask", mask.numel(), size, rule)
    elif batch.spec_info is not None:
        check_trees(batch)
    items = batch.multi_item
    if items is not None and len(items.token_pos_in_items) < total:
        places = len(items.token_pos_in_items)
        _check_count("multi_item.token_pos_in_items", places, total, "one a new token")


def check_picks(batch: ForwardBatch, block_size: int = 0) -> None:
    """Refuse picked keys that come after their token, and keys that are picked twice.

    block_size: the layer's; of a layer without, picked blocks are not checked. Rows after the last
    request's tokens are not checked.
    """
    picks = batch.topk_indices
    if picks is None or (picks.dim() == 3 and not block_size):
        return
    new, cached = batch.extend_seq_lens, batch.extend_prefix_lens
    last = batch.seq_lens.long() - 1
    if new is not None and cached is not None:
        last = _places(cached, new)
    picks = picks[: len(last)].long()
    heads, what = 1, "key"
    if picks.dim() == 3:
        heads, what = picks.shape[1], "block"
        last = (last // block_size).repeat_interleave(heads)
        picks = picks.flatten(0, 1)
    place = _first_place((picks < -1) | (picks > last.clamp(min=-1).unsqueeze(1)))
    if place is not None:
        raise InvalidInput(
            "topk_indices",
            got=f"{what} {int(picks[place])} for token {place[0] // heads}",
            expected=f"-1, or up to {int(last[place[0]])}, the token's own place in its sequence",
        )
    ordered = picks.sort(dim=1).values
    place = _first_place((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0))
    if place is not None:
        raise InvalidInput(
            "topk_indices",
            got=f"{what} {int(ordered[place])} twice for token {place[0] // heads}",
            expected="each key once: a kernel would count it twice",
        )


def _first_place(wrong: torch.Tensor) -> tuple[int, int] | None:
    """Row and column of the first True in [B, n] bool."""
    places = wrong.nonzero()
    return (int(places[0, 0]), int(places[0, 1])) if places.numel() else None


def _check_count(field: str, count: int, expected: int, rule: str) -> None:
    if count != expected:
        raise InvalidInput(field, got=f"{count} values", expected=f"{expected}, {rule}")


def _check_mirror(field: str, values: torch.Tensor | None, mirror: torch.Tensor | None) -> None:
    if mirror is not None and (values is None or not torch.equal(values.cpu(), mirror)):
        on_device = None if values is None else values.tolist()
        expected = f"{on_device}, as on the device"
        raise InvalidInput(f"{field}_cpu", got=mirror.tolist(), expected=expected)


def _within(field: str, values: torch.Tensor, bound: int) -> None:
    if values.numel() and (int(values.min()) < 0 or int(values.max()) >= bound):
        got = f"values from {int(values.min())} to {int(values.max())}"
        raise InvalidInput(field, got=got, expected=f"0 to {bound - 1}")
