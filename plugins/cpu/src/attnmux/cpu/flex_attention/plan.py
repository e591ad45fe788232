"""The plan of a step: the kernel's arguments, shared by layers of one rule and one pool."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from attnmux.core import torch_dtype
from attnmux.cpu.flex_attention.blocks import (
    GATHERED_BLOCK,
    LEAST_CAPACITY,
    LEAST_LISTED,
    LEAST_MASK,
    Extent,
    block_lists,
    block_of_page,
    capacity_of,
    gathered_keys,
    keys_on_pages,
    least_tiles,
    listed_of,
    ranges,
    tile_count,
)
from attnmux.cpu.flex_attention.kernel import KernelInput, KernelSpec, block_list, list_room

if TYPE_CHECKING:
    from attnmux.core import BackendContext, ForwardBatch, LayerSpec
    from attnmux.cpu.flex_attention.blocks import BlockLists, Keys, Ranges, Tiles
    from attnmux.cpu.steps import KeyRule, StepLens


ROWS = 64
"""The most rows of a tile on a GPU. A CPU takes one less: with 64, one with AMX would
repack the whole pool at every call."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Plan:
    """A step of the layers that share a rule, a pool and a number of query heads per KV head."""

    tile_size: int
    block: int
    listed: int
    tokens: torch.Tensor
    """[N * tile_size] int64: the row of q that each place of a tile holds."""
    places: torch.Tensor
    """[T] int64: the place of each row of q in `tokens`."""
    slots: torch.Tensor | None
    """See `Keys.slots`."""
    given: KernelInput


def tile_size(layer: LayerSpec, device: torch.device) -> int:
    """Queries of a tile in an extend step: the largest power of two whose rows fit into `ROWS`."""
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
    """Whether to list the blocks that need no mask separately.

    A CPU computes a mask key by key, so that it gains. Triton's decode kernel would
    divide such a list among its splits by the size of the pool.
    """
    return device.type == "cpu"


def spec_of(plan: Plan, layer: LayerSpec, dtype: torch.dtype, *, lse: bool) -> KernelSpec:
    """The kernel that serves a layer of the plan."""
    kernel_input = plan.given
    return KernelSpec(
        device=kernel_input.first.device,
        dtype=dtype,
        num_tiles=kernel_input.first.shape[0],
        tile_size=plan.tile_size,
        group=layer.tp_q_head_num // layer.tp_k_head_num,
        num_kv_heads=layer.tp_k_head_num,
        qk_head_dim=layer.qk_head_dim,
        v_head_dim=layer.v_head_dim,
        latent=layer.kind == "mla",
        block=plan.block,
        listed=plan.listed,
        capacity=kernel_input.columns.shape[0],
        has_items=kernel_input.hidden is not None,
        mask_room=0 if kernel_input.mask is None else kernel_input.mask[0].shape[0],
        split=kernel_input.whole is not None,
        capped=layer.logit_cap > 0,
        biased=layer.alibi_slopes is not None,
        relative=relative_columns(layer),
        has_place=kernel_input.place is not None,
        lse=lse,
    )


def relative_columns(layer: LayerSpec) -> int:
    """See `KernelSpec.relative`."""
    return 0 if layer.relative_bias is None else layer.relative_bias.shape[1]


def first_specs(context: BackendContext) -> Iterator[KernelSpec]:
    """The kernels of the shortest steps of the request's phases, for each kind of layer."""
    request, pool, device = context.request, context.token_to_kv_pool, context.device
    phases = set(request.phases)
    masked = request.custom_mask or request.has_trees
    for layer in context.layers:
        in_call = not layer.is_causal or layer.layer_id not in pool.layer_ids
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
            biased=layer.alibi_slopes is not None,
            relative=relative_columns(layer),
            has_place=not layer.is_causal and not layer.is_cross_attention,
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
    """`capacity` and `listed` of the layer's `KernelSpec`; the least for gathered keys."""
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
        place=seen.place,
        num_partial=counted(lists.num_partial),
        partial=listed(lists.partial),
        num_whole=None if lists.num_whole is None else counted(lists.num_whole),
        whole=None if lists.whole is None else listed(lists.whole),
        hidden=seen.hidden,
        mask=seen.mask,
    )


class FixedPlan:
    """Buffers for the largest step of graphs. They hold one step at a time."""

    def __init__(
        self, context: BackendContext, layer_id: int, size: int, *, max_bs: int, max_num_tokens: int
    ) -> None:
        self.max_bs, self.max_num_tokens = max_bs, max_num_tokens
        block = block_of_page(context.token_to_kv_pool.page_size)
        columns = context.req_to_token_pool.max_context_len
        self.width = -(-columns // block)
        """Blocks of the longest request that the table has room for."""
        self._listed = listed_of(context, block)
        self._capacity = capacity_of(context, layer_id, block)
        count, device = tile_count(max_num_tokens, max_bs, size), context.device
        self._tokens = torch.zeros((count, size), dtype=torch.int64, device=device)
        self._places = torch.zeros(max_num_tokens, dtype=torch.int64, device=device)
        self._columns = torch.zeros(self._capacity, dtype=torch.int32, device=device)
        self._first = torch.zeros((count, size), dtype=torch.int32, device=device)
        self._end = torch.zeros_like(self._first)
        lists = 2 if splits(device) else 1
        self._counts = torch.zeros((lists, count, 1, 1), dtype=torch.int32, device=device)
        room = list_room(device, count, self._listed, self._capacity)
        self._lists = torch.zeros((lists, room), dtype=torch.int32, device=device)

    def has_room(self, max_bs: int, max_num_tokens: int) -> bool:
        """Whether steps of these sizes fit."""
        return max_bs <= self.max_bs and max_num_tokens <= self.max_num_tokens

    def holds(self, batch: ForwardBatch) -> bool:
        """Whether the step fits. Steps with a custom mask or items have no buffers here."""
        is_plain = batch.multi_item is None and batch.tree_mask is None
        has_graphs = batch.forward_mode.is_decode() or batch.forward_mode.is_target_verify()
        return is_plain and has_graphs and self.has_room(batch.batch_size, batch.num_tokens)

    def take(self, plan: Plan) -> Plan:
        """Copy a plan into the buffers and return the copy."""
        kernel_input, count = plan.given, plan.given.first.shape[0]
        whole = num_whole = None
        if kernel_input.whole is not None and kernel_input.num_whole is not None:
            whole = self._list(1, kernel_input.whole)
            num_whole = self._counts[1, :count].copy_(kernel_input.num_whole)
        return replace(
            plan,
            tokens=self._tokens[:count].copy_(plan.tokens.view(count, -1)).flatten(),
            places=self._places[: plan.places.shape[0]].copy_(plan.places),
            given=KernelInput(
                columns=self._columns.copy_(kernel_input.columns),
                first=self._first[:count].copy_(kernel_input.first),
                end=self._end[:count].copy_(kernel_input.end),
                place=None,
                num_partial=self._counts[0, :count].copy_(kernel_input.num_partial),
                partial=self._list(0, kernel_input.partial),
                num_whole=num_whole,
                whole=whole,
                hidden=None,
                mask=None,
            ),
        )

    def _list(self, which: int, blocks: torch.Tensor) -> torch.Tensor:
        count, listed = blocks.shape[0], self._listed
        rows = blocks.as_strided((count, listed), (listed, 1))
        self._lists[which, : count * listed].view(count, listed).copy_(rows)
        return block_list(self._lists[which], count, listed, self._capacity)


def first_of(fixed: Iterable[FixedPlan], batch: ForwardBatch) -> FixedPlan | None:
    """The first buffers that hold the step: the same ones at capture and at every replay."""
    return next((buffers for buffers in fixed if buffers.holds(batch)), None)
