"""From the lengths of a step to its batch, the pools' contents and every layer's tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from attnmux.core.batch import ForwardBatch, MultiItem
from attnmux.core.kv.quantise import FP8_DTYPES, quantise
from attnmux.core.layer import LayerSpec
from attnmux.core.spec import SpecInput, tree_mask
from attnmux.testing.cases import Step
from attnmux.testing.picks import pick, unwritten
from attnmux.testing.placement import (
    Placed,
    buffers,
    fill_pool,
    place,
    put,
    stored_rows,
)
from attnmux.testing.world import World

UNREAD_ITEM_POSITION = 9999
"""Stands for tokens of a shared prefix, whose place in an item nobody may read."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LayerInput:
    """The arguments of one layer's call."""

    layer: LayerSpec
    q: torch.Tensor
    k: torch.Tensor | None = None
    v: torch.Tensor | None = None
    q_rope: torch.Tensor | None = None
    k_rope: torch.Tensor | None = None
    topk_indices: torch.Tensor | None = None
    """What the layer's indexer picks: it is written to the batch before the call."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PreparedStep:
    """A step that can run: the pools are filled, the batch and the layers' inputs are made."""

    batch: ForwardBatch
    inputs: tuple[LayerInput, ...]
    num_real_tokens: int
    """Rows of real requests, which come first; those of padding requests follow."""
    num_request_tokens: int
    """Rows of all requests; rows of none follow."""
    save_kv_cache: bool


def prepare_step(
    world: World, step: Step, *, seq_len_fill: int = 1, host_lens: bool = False
) -> PreparedStep:
    """Fill the world's pools for `step`, and make its batch and inputs.

    `seq_len_fill` is the backend's `get_cuda_graph_seq_len_fill_value()`; with `host_lens` the
    batch carries its host mirrors.
    """
    requests = place(world, step, seq_len_fill)
    fill_pool(world, requests, has_padding=step.padding + step.trailing > 0)
    batch = _make_batch(world, step, requests, host_lens)
    inputs = tuple(
        _make_input(world, layer, batch, fused=index % 2 == 1)
        for index, layer in enumerate(world.context.layers)
    )
    if world.case.index_topk:
        inputs = tuple(
            replace(given, topk_indices=pick(world, requests, batch, in_front=index % 2 == 0))
            for index, given in enumerate(inputs)
        )
    return PreparedStep(
        batch=batch,
        inputs=inputs,
        num_real_tokens=sum(step.new),
        num_request_tokens=sum(request.new for request in requests),
        save_kv_cache=world.case.save_kv_cache,
    )


def kv_rows(
    world: World, given: LayerInput, batch: ForwardBatch
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """What the layer's call has to write: slots [n] of its `buffers`, and rows [n, …] of each."""
    loc = batch.encoder_out_cache_loc if given.layer.is_cross_attention else batch.out_cache_loc
    if given.k is None or loc is None or not world.case.save_kv_cache:
        return batch.out_cache_loc[:0], ()
    if given.k_rope is not None:
        rows = [torch.cat([given.k, given.k_rope], dim=-1)]
    else:
        rows = [tensor for tensor in (given.k, given.v) if tensor is not None]
    pool = world.context.token_to_kv_pool
    return pool.translate(loc, given.layer.layer_id), stored_rows(world, given.layer, rows)


def _make_batch(world: World, step: Step, requests: list[Placed], host_lens: bool) -> ForwardBatch:
    device = world.context.device

    def lengths(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    is_extend = step.mode.is_extend()
    is_verify = step.mode.is_target_verify()
    new = lengths([request.new for request in requests])
    cached = lengths([request.cached for request in requests])
    seq_lens = cached.clone() if is_verify else cached + new
    spec_info, depths = _speculate(world, requests) if is_verify else (None, None)
    nothing = torch.zeros(step.trailing, dtype=torch.int64, device=device)
    out_cache_loc = torch.cat([request.new_slots for request in requests] + [nothing])
    has_encoder = bool(step.encoder)
    return ForwardBatch(
        forward_mode=step.mode,
        batch_size=len(requests),
        req_pool_indices=torch.tensor(
            [request.row for request in requests], dtype=torch.int64, device=device
        ),
        seq_lens=seq_lens,
        out_cache_loc=out_cache_loc,
        positions=torch.cat([_positions(requests, depths, device), nothing]),
        seq_lens_cpu=seq_lens.cpu() if host_lens else None,
        seq_lens_sum=int(seq_lens.sum()) if host_lens else None,
        extend_seq_lens=new if is_extend else None,
        extend_seq_lens_cpu=new.cpu() if is_extend and host_lens else None,
        extend_prefix_lens=cached if is_extend else None,
        extend_prefix_lens_cpu=cached.cpu() if is_extend and host_lens else None,
        extend_num_tokens=len(out_cache_loc) if is_extend else None,
        encoder_lens=lengths([request.encoder for request in requests]) if has_encoder else None,
        encoder_out_cache_loc=torch.cat(
            [request.encoder_slots for request in requests if request.new_encoder] or [nothing]
        )
        if has_encoder
        else None,
        topk_indices=unwritten(world, len(out_cache_loc)),
        spec_info=spec_info,
        multi_item=_multi_item(step, device) if step.items else None,
    )


def _positions(
    requests: list[Placed], depths: torch.Tensor | None, device: torch.device
) -> torch.Tensor:
    """A token's place in its sequence; a draft token's is behind its ancestors."""
    parts = [torch.zeros(0, dtype=torch.int64, device=device)]
    for index, request in enumerate(requests):
        order = torch.arange(request.new, device=device) if depths is None else depths[index]
        parts.append((request.cached + order).clamp(min=0))
    return torch.cat(parts)


def _speculate(world: World, requests: list[Placed]) -> tuple[SpecInput, torch.Tensor | None]:
    """The step's SpecInput and, for trees, the depth of each draft token, [B, d]."""
    case, device = world.case, world.context.device
    num_draft_tokens = requests[0].new
    if not case.custom_mask:
        return SpecInput(draft_token_num=num_draft_tokens), None
    parents = torch.full((len(requests), num_draft_tokens), -1)
    depths = torch.zeros_like(parents)
    for token in range(1, num_draft_tokens):
        parents[:, token] = torch.randint(token, (len(requests),), generator=world.generator)
        depths[:, token] = depths.gather(1, parents[:, token : token + 1]).squeeze(1) + 1
    widths = torch.tensor([num_draft_tokens * request.length for request in requests])
    spec_info = SpecInput(
        draft_token_num=num_draft_tokens,
        topk=case.spec_topk or 1,
        custom_mask=tree_mask(parents, torch.tensor([request.cached for request in requests])).to(
            device
        ),
        mask_indptr=torch.nn.functional.pad(widths.cumsum(0), (1, 0)).int().to(device),
    )
    return spec_info, depths.to(device)


def _multi_item(step: Step, device: torch.device) -> MultiItem:
    prefixes = [length - sum(items) for length, items in zip(step.lens, step.items, strict=True)]
    in_items: list[int] = []
    for prefix, items, length, new in zip(prefixes, step.items, step.lens, step.new, strict=True):
        places = [place for item in items for place in range(item)]
        whole = [UNREAD_ITEM_POSITION] * prefix + places
        in_items += whole[length - new :]
    return MultiItem(
        prefix_lens=torch.tensor(prefixes, dtype=torch.int32, device=device),
        token_pos_in_items=torch.tensor(in_items, dtype=torch.int32, device=device),
    )


def _make_input(world: World, layer: LayerSpec, batch: ForwardBatch, *, fused: bool) -> LayerInput:
    """Random tensors; with `fused` the rows of Q, K and V are parts of longer rows, as they come
    out of one projection. Both parts of MLA's are then parts of one row, and else of longer ones.
    Over KV of 8-bit floats Q has values of their format, so that a kernel may round it there.
    """
    num_tokens, rope = batch.num_tokens, layer.qk_rope_head_dim
    kv_dtype = world.context.token_to_kv_pool.dtype
    between = 64 if fused != bool(rope) else 0

    def draw(count: int, heads: int, width: int) -> torch.Tensor:
        made = world.random(count, between + heads * width)
        return made[:, between:].view(count, heads, width)

    def draw_q(width: int) -> torch.Tensor:
        drawn = draw(num_tokens, layer.tp_q_head_num, width)
        return drawn.copy_(quantise(drawn, kv_dtype, None)) if kv_dtype in FP8_DTYPES else drawn

    def both(
        drawn: Callable[[int], torch.Tensor], width: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A part of `width`, and the rotary one where there is one."""
        if fused and rope:
            rows = drawn(width + rope)
            return rows[..., :width], rows[..., width:]
        return drawn(width), drawn(rope) if rope else None

    num_keys = num_tokens
    if layer.is_cross_attention and batch.encoder_out_cache_loc is not None:
        num_keys = len(batch.encoder_out_cache_loc)
    q, q_rope = both(draw_q, layer.query_dim)
    if layer.is_cross_attention and not num_keys:
        return LayerInput(layer=layer, q=q)
    k, k_rope = both(partial(draw, num_keys, layer.tp_k_head_num), layer.qk_head_dim - rope)
    v = None if rope else draw(num_keys, layer.tp_v_head_num, layer.v_head_dim)
    given = LayerInput(layer=layer, q=q, q_rope=q_rope, k=k, k_rope=k_rope, v=v)
    if world.case.kv_in_pool:
        loc, rows = kv_rows(world, given, batch)
        for buffer, new in zip(buffers(world, layer.layer_id), rows, strict=True):
            put(buffer, loc, new)
        return LayerInput(layer=layer, q=q, q_rope=q_rope)
    return given
