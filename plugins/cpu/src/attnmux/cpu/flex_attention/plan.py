"""Once a step: what the kernel is given for the layers that share a rule and a pool."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
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
    gathered_room,
    keys_on_pages,
    listed_of,
)
from attnmux.cpu.flex_attention.ranges import LEAST_MASK, block_lists, ranges
from attnmux.cpu.flex_attention.spec import KernelInput, KernelSpec, block_list, list_room
from attnmux.cpu.flex_attention.tiles import call_sizes, calls, most_tiles

if TYPE_CHECKING:
    from attnmux.core.backend import BackendContext
    from attnmux.core.batch import ForwardBatch
    from attnmux.core.layer import LayerSpec
    from attnmux.cpu.flex_attention.keys import Keys
    from attnmux.cpu.flex_attention.ranges import BlockLists, Ranges
    from attnmux.cpu.flex_attention.tiles import StepLens, Tiles
    from attnmux.cpu.torch_native.visibility import KeyRule

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
    """Of all tiles."""

    def calls(self) -> Iterator[tuple[slice, KernelInput]]:
        """The tiles of each call of a kernel, and what it is given."""
        sizes = calls(self.given.first.shape[0])
        stops = tuple(accumulate(sizes))
        for size, stop in zip(sizes, stops, strict=True):
            tiles = slice(stop - size, stop)
            yield tiles, self.given if len(sizes) == 1 else self.given.of_tiles(tiles)


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


def spec_of(
    plan: Plan, given: KernelInput, layer: LayerSpec, dtype: torch.dtype, *, lse: bool
) -> KernelSpec:
    """The kernel of a layer's call under its plan.

    given: what `plan.calls` gives it.
    """
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


def specs_ahead(context: BackendContext, *, all_sizes: bool) -> Iterator[KernelSpec]:
    """The kernels that the request's phases call, for each kind of layer.

    all_sizes: those of steps up to the largest that batch size and cache allow, not of the
    shortest alone.
    """
    request, pool, device = context.request, context.token_to_kv_pool, context.device
    phases = set(request.phases)
    masked = bool(request.custom_mask or (request.spec_topk or 1) > 1)
    for layer in context.layers:
        block = block_of_page(pool.page_size) if layer.is_causal else 0
        capacity, listed = _room(context, layer)
        plain = KernelSpec(
            device=device,
            dtype=torch_dtype(request.dtype) if request.dtype else pool.dtype,
            num_tiles=0,
            tile_size=1,
            group=layer.tp_q_head_num // layer.tp_k_head_num,
            num_kv_heads=layer.tp_k_head_num,
            qk_head_dim=layer.qk_head_dim,
            v_head_dim=layer.v_head_dim,
            latent=layer.kind == "mla",
            block=block or GATHERED_BLOCK,
            listed=listed,
            capacity=capacity,
            has_items=False,
            mask_room=0,
            split=splits(device),
            capped=layer.logit_cap > 0,
            lse=request.lse or layer.sinks is not None,
        )
        kinds = [plain] if "decode" in phases else []
        tiled = replace(plain, tile_size=tile_size(layer, device))
        if phases & {"extend", "draft", "encoder"} or (
            "verify" in phases and (layer.is_cross_attention or not masked)
        ):
            kinds.append(tiled)
        if request.multi_item and "extend" in phases:
            kinds.append(replace(tiled, has_items=True, split=False))
        if masked and "verify" in phases and not layer.is_cross_attention:
            kinds.append(replace(tiled, mask_room=LEAST_MASK, split=False))
        for kind in kinds:
            most = _most_tiles(context, layer, kind.tile_size) if all_sizes else 1
            yield from (replace(kind, num_tiles=tiles) for tiles in call_sizes(most))


def _most_tiles(context: BackendContext, layer: LayerSpec, size: int) -> int:
    """Of the largest step: decoding for a tile size of 1, else an extend step."""
    if size == 1:
        return context.max_batch_size
    tokens = context.max_batch_size * context.max_context_len
    if layer.is_causal:
        tokens = min(tokens, context.token_to_kv_pool.size)
    return most_tiles(tokens, context.max_batch_size, size)


def _room(context: BackendContext, layer: LayerSpec) -> tuple[int, int]:
    """Capacity and listed of the layer's kernels, see `KernelSpec`; for an encoder's the least."""
    if not layer.is_causal:
        return LEAST_CAPACITY, LEAST_LISTED
    block = block_of_page(context.token_to_kv_pool.page_size)
    if not block:
        return gathered_room(context)
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
