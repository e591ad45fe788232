"""Once a step: what the kernel is given for the layers that share a rule and a pool."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from attnmux.core.dtypes import torch_dtype
from attnmux.cpu.flex_attention.keys import (
    GATHERED_BLOCK,
    LEAST_CAPACITY,
    LEAST_LISTED,
    Extent,
    block_of_page,
    capacity_of,
    gathered_keys,
    keys_on_pages,
    listed_of,
)
from attnmux.cpu.flex_attention.ranges import LEAST_MASK, block_lists, ranges
from attnmux.cpu.flex_attention.spec import KernelInput, KernelSpec, block_list, list_room
from attnmux.cpu.flex_attention.tiles import least_tiles

if TYPE_CHECKING:
    from attnmux.core.batch import ForwardBatch
    from attnmux.core.context import BackendContext
    from attnmux.core.layer import LayerSpec
    from attnmux.cpu.flex_attention.keys import Keys
    from attnmux.cpu.flex_attention.ranges import BlockLists, Ranges
    from attnmux.cpu.flex_attention.tiles import Tiles
    from attnmux.cpu.steps import KeyRule, StepLens

ROWS = 64
"""Of a tile, at most; on a CPU less, since one with AMX would pack the whole pool at every call."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Plan:
    """One step of the layers that share a rule, a pool and a number of heads to a group."""

    tile_size: int
    block: int
    listed: int
    tokens: torch.Tensor
    """[N * tile_size] int64: rows of q."""
    places: torch.Tensor
    """[T] int64: where each row of q is among these."""
    slots: torch.Tensor | None
    """What to gather, see `Keys.slots`."""
    given: KernelInput


def tile_size(layer: LayerSpec, device: torch.device) -> int:
    """Queries of a tile in an extend step: a power of two, all heads of a group within `ROWS`."""
    group = layer.tp_q_head_num // layer.tp_k_head_num
    rows = ROWS - 1 if device.type == "cpu" else ROWS
    return 1 << max(rows // group, 1).bit_length() - 1


def make_plan(
    rule: KeyRule,
    layer: LayerSpec,
    batch: ForwardBatch,
    lens: StepLens,
    tiles: Tiles,
    context: BackendContext,
    *,
    width: int | None = None,
) -> Plan:
    """Plan the layer's share of a step.

    width: as for `keys_on_pages`; without it this synchronises once.
    """
    extent = Extent.of(rule, lens)
    block = block_of_page(context.token_to_kv_pool.page_size)
    if rule.in_call or not block:
        keys = gathered_keys(extent, rule, layer.layer_id, batch, context)
    else:
        keys = keys_on_pages(extent, layer.layer_id, batch, context, width=width)
    seen = ranges(rule, batch, lens, tiles, keys)
    lists = block_lists(seen, tiles, keys, split=splits(context.device))
    return Plan(
        tile_size=tiles.size,
        block=keys.block,
        listed=keys.listed,
        tokens=tiles.tokens.flatten(),
        places=tiles.places,
        slots=keys.slots,
        given=_given(keys, seen, lists),
    )


def splits(device: torch.device) -> bool:
    """Whether blocks that need no mask are listed apart: a CPU works a mask out key by key, and
    Triton's decode kernel would share them out among its splits by the size of the pool."""
    return device.type == "cpu"


def spec_of(plan: Plan, layer: LayerSpec, dtype: torch.dtype, *, lse: bool) -> KernelSpec:
    """What to call for a layer under its plan."""
    given = plan.given
    return KernelSpec(
        device=given.first.device,
        dtype=dtype,
        num_tiles=given.first.shape[0],
        tile_size=plan.tile_size,
        group=layer.tp_q_head_num // layer.tp_k_head_num,
        num_kv_heads=layer.tp_k_head_num,
        qk_head_dim=layer.qk_head_dim,
        v_head_dim=layer.v_head_dim,
        latent=layer.kind == "mla",
        block=plan.block,
        listed=plan.listed,
        capacity=given.columns.shape[0],
        has_items=given.hidden is not None,
        mask_room=0 if given.mask is None else given.mask[0].shape[0],
        split=given.whole is not None,
        capped=layer.logit_cap > 0,
        lse=lse,
    )


def first_specs(context: BackendContext) -> Iterator[KernelSpec]:
    """What the shortest steps of the request's phases call, for each kind of layer."""
    request, pool, device = context.request, context.token_to_kv_pool, context.device
    phases = set(request.phases)
    masked = bool(request.custom_mask or (request.spec_topk or 1) > 1)
    for layer in context.layers:
        in_call = not layer.is_causal
        block = 0 if in_call else block_of_page(pool.page_size)
        keys = _room(context, layer, block)
        plain = KernelSpec(
            device=device,
            dtype=torch_dtype(request.dtype) if request.dtype else pool.dtype,
            num_tiles=least_tiles(1),
            tile_size=1,
            group=layer.tp_q_head_num // layer.tp_k_head_num,
            num_kv_heads=layer.tp_k_head_num,
            qk_head_dim=layer.qk_head_dim,
            v_head_dim=layer.v_head_dim,
            latent=layer.kind == "mla",
            block=block or GATHERED_BLOCK,
            listed=keys[1],
            capacity=keys[0],
            has_items=False,
            mask_room=0,
            split=splits(device),
            capped=layer.logit_cap > 0,
            lse=request.lse or layer.sinks is not None,
        )
        if "decode" in phases:
            yield plain
        if phases == {"decode"}:
            continue
        size = tile_size(layer, device)
        tiled = replace(plain, tile_size=size, num_tiles=least_tiles(size))
        if layer.is_cross_attention or phases & {"extend", "draft", "encoder"} or not masked:
            yield tiled
        if request.multi_item and "extend" in phases:
            yield replace(tiled, has_items=True, split=False)
        if masked and "verify" in phases and not layer.is_cross_attention:
            yield replace(tiled, mask_room=LEAST_MASK, split=False)


def _room(context: BackendContext, layer: LayerSpec, block: int) -> tuple[int, int]:
    """Capacity and listed of the layer's kernels, see `KernelSpec`; for gathered keys the least."""
    if not block:
        return LEAST_CAPACITY, LEAST_LISTED
    return capacity_of(context, layer.layer_id, block), listed_of(context, block)


def _given(keys: Keys, seen: Ranges, lists: BlockLists) -> KernelInput:
    capacity = keys.columns.shape[0]

    def counted(numbers: torch.Tensor) -> torch.Tensor:
        return numbers.int().view(-1, 1, 1)

    def listed(blocks: torch.Tensor) -> torch.Tensor:
        count, width = blocks.shape
        memory = blocks.new_empty(
            list_room(blocks.device, count, keys.listed, capacity), dtype=torch.int32
        )
        memory[: count * keys.listed].view(count, -1)[:, :width] = blocks
        return block_list(memory, count, keys.listed, capacity)

    return KernelInput(
        columns=keys.columns,
        first=seen.first,
        end=seen.end,
        num_partial=counted(lists.num_partial),
        partial=listed(lists.partial),
        num_whole=None if lists.num_whole is None else counted(lists.num_whole),
        whole=None if lists.whole is None else listed(lists.whole),
        hidden=seen.hidden,
        mask=seen.mask,
    )
