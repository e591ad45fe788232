"""Attention by torch's compiled `flex_attention`, which reads pages in place.

A step's queries are cut into tiles of one request each, the kernel's batch dimension. The device
works out what each tile reads and sees (`plan.py`, `blocks.py`). Each layer is one call of a kernel
that is compiled once for its shape (`kernel.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import TYPE_CHECKING

import torch

from attnmux.core import (
    AttentionBackend,
    AttentionCall,
    AttnmuxError,
    BackendContext,
    ForwardMode,
    GraphUnsupported,
)
from attnmux.cpu.flex_attention.blocks import Tiles, block_of_page, make_tiles
from attnmux.cpu.flex_attention.kernel import check_reach, heads_first, kernel, plain_tensors
from attnmux.cpu.flex_attention.plan import (
    FixedPlan,
    Plan,
    first_of,
    first_specs,
    make_plan,
    spec_of,
    tile_size,
)
from attnmux.cpu.steps import KeyRule, StepLens, keys_and_values

if TYPE_CHECKING:
    from attnmux.core import ForwardBatch, LayerSpec
    from attnmux.cpu.flex_attention.kernel import Kernel, KernelSpec


class FlexAttentionBackend(AttentionBackend):
    """Every feature that a mask can express; on a GPU also LSE and sinks."""

    def __init__(
        self,
        context: BackendContext,
        options: Mapping[str, object] = AttentionBackend.NO_OPTIONS,
        kernels: Callable[[KernelSpec], Kernel] = kernel,
    ) -> None:
        """Compile the kernels of the smallest steps of the request's phases, others when needed.

        kernels: returns the kernel of a shape. Raises BackendFailed if one does not compile, and
        on a GPU for a pool that holds 2**31 elements or more of a layer's K or V.
        """
        super().__init__(context, options)
        _check_pool(context)
        self._kernels = kernels
        self._lens: StepLens | None = None
        self._tiles: dict[int, Tiles] = {}
        self._plans: dict[tuple[KeyRule, int, int], Plan] = {}
        self._fixed: dict[tuple[KeyRule, int, int], list[FixedPlan]] = {}
        with plain_tensors():
            self._numbers = {layer.layer_id: self._numbers_of(layer) for layer in context.layers}
        for spec in first_specs(context):
            kernels(spec)

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The prepared step's plans, one for each group of layers."""
        return tuple(self._plans.values())

    def init_forward_metadata_out_graph(
        self, batch: ForwardBatch, in_capture: bool = False
    ) -> None:
        """Plan the step for every layer whose K and V are in the pool.

        A step that fits the buffers of graphs is planned there, without synchronising.
        """
        buffers = list(self._fixed.values())
        if in_capture and not (buffers and all(first_of(fixed, batch) for fixed in buffers)):
            raise GraphUnsupported(
                "flex_attention captures DECODE and TARGET_VERIFY of the sizes that "
                "init_cuda_graph_state announced, without a custom mask or items"
            )
        self._plans.clear()
        self._tiles.clear()
        self._lens = None
        if batch.forward_mode is ForwardMode.IDLE:
            return
        with plain_tensors():
            self._lens = StepLens.on_device(batch)
            if not batch.num_tokens:
                return
            for layer in self.context.layers:
                if layer.layer_id in self.context.token_to_kv_pool.layer_ids:
                    self._plan(layer, batch, in_call=False)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate buffers for DECODE and TARGET_VERIFY.

        Raises GraphUnsupported for pages whose keys are gathered, because the number of keys is
        known only at replay.
        """
        page_size = self.context.token_to_kv_pool.page_size
        if not block_of_page(page_size):
            raise GraphUnsupported(
                f"flex_attention gathers the keys from pages of {page_size} tokens, which a graph "
                "cannot hold; take a page size that is a multiple of 16"
            )
        with plain_tensors():
            for layer in self.context.layers:
                for size in (1, tile_size(layer, self.context.device)):
                    fixed = self._fixed.setdefault(self._shared_by(layer, size, in_call=False), [])
                    if not any(buffers.has_room(max_bs, max_num_tokens) for buffers in fixed):
                        fixed.append(
                            FixedPlan(
                                self.context,
                                layer.layer_id,
                                size,
                                max_bs=max_bs,
                                max_num_tokens=max_num_tokens,
                            )
                        )

    def forward_decode(self, call: AttentionCall, batch: ForwardBatch) -> torch.Tensor:
        return self._attend(call, batch, in_call=False)

    def forward_extend(self, call: AttentionCall, batch: ForwardBatch) -> torch.Tensor:
        return self._attend(call, batch, in_call=call.has_own_kv)

    def _attend(self, call: AttentionCall, batch: ForwardBatch, *, in_call: bool) -> torch.Tensor:
        q, q_rope, layer, lse = call.q, call.q_rope, call.layer, call.lse
        pool = self.context.token_to_kv_pool
        if not q.shape[0]:
            return q.new_empty((0, layer.tp_q_head_num, layer.v_head_dim))
        with plain_tensors():
            plan = self._plan(layer, batch, in_call=in_call)
            keys, values = self._blocks(plan, *keys_and_values(call, pool, in_call=in_call))
            needs_lse = lse is not None or layer.sinks is not None
            spec = spec_of(plan, layer, q.dtype, lse=needs_lse)
            queries = _rows(q if q_rope is None else torch.cat([q, q_rope], dim=-1), plan, layer)
            result, result_lse = self._kernels(spec)(
                queries,
                heads_first(keys),
                heads_first(keys[..., : layer.v_head_dim] if values is None else values),
                self._numbers[layer.layer_id],
                plan.given,
            )
            out = _unrows(result, plan, layer)
            if result_lse is not None:
                of_tokens = _unrows(result_lse.unsqueeze(-1), plan, layer).squeeze(-1)
                if layer.sinks is not None:
                    out = out * torch.sigmoid(of_tokens - layer.sinks).unsqueeze(-1).to(out.dtype)
                    of_tokens = torch.logaddexp(of_tokens, layer.sinks)
                if lse is not None:
                    lse.copy_(of_tokens)
            v_scale = 1.0 if in_call else pool.read_scales(layer.k_scale, layer.v_scale)[1]
            return out if v_scale == 1 else out * v_scale

    def _numbers_of(self, layer: LayerSpec) -> torch.Tensor:
        """The layer's numbers, as the kernel takes them."""
        k_scale, _ = self.context.token_to_kv_pool.read_scales(layer.k_scale, layer.v_scale)
        numbers = torch.tensor([layer.scaling * k_scale, layer.logit_cap])
        if layer.alibi_slopes is not None:
            numbers = torch.cat([numbers, layer.alibi_slopes.cpu()])
        if layer.relative_bias is not None:
            numbers = torch.cat([numbers, layer.relative_bias.cpu().flatten()])
        return numbers.to(self.context.device)

    def _blocks(
        self, plan: Plan, keys: torch.Tensor, values: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """K and V in whole blocks, [S, Hkv, D] each: the pool's buffers, or gathered scratch."""
        slots = plan.slots
        if slots is None:
            return keys.detach(), None if values is None else values.detach()

        def gathered(name: str, source: torch.Tensor) -> torch.Tensor:
            shape = (slots.shape[0], *source.shape[1:])
            check_reach(source.device, prod(shape), f"what a step gathers of {name}")
            scratch = self.context.workspace.tensor(f"flex_attention.{name}", shape, source.dtype)
            return torch.index_select(source.detach(), 0, slots, out=scratch)

        return gathered("keys", keys), None if values is None else gathered("values", values)

    def _plan(self, layer: LayerSpec, batch: ForwardBatch, *, in_call: bool) -> Plan:
        """The step's plan for a layer. The first of the layers that share it makes it."""
        if self._lens is None:
            raise AttnmuxError("no step is prepared: call init_forward_metadata(batch) first")
        size = 1 if batch.forward_mode.is_decode() else tile_size(layer, self.context.device)
        key = self._shared_by(layer, size, in_call=in_call)
        plan = self._plans.get(key)
        if plan is None:
            tiles = self._tiles.get(size)
            if tiles is None:
                tiles = self._tiles[size] = make_tiles(self._lens, batch.num_tokens, size)
            fixed = first_of(self._fixed.get(key, ()), batch)
            width = None if fixed is None else fixed.width
            plan = make_plan(key[0], layer, batch, self._lens, tiles, self.context, width=width)
            plan = plan if fixed is None else fixed.take(plan)
            self._plans[key] = plan
        return plan

    def _shared_by(self, layer: LayerSpec, size: int, *, in_call: bool) -> tuple[KeyRule, int, int]:
        """The key of a plan: its rule, tile size and group of the pool."""
        group = 0 if in_call else self.context.token_to_kv_pool.group_of(layer.layer_id)
        return KeyRule.of(layer, in_call=in_call), size, group


def _check_pool(context: BackendContext) -> None:
    """Raises BackendFailed as `check_reach`."""
    pool = context.token_to_kv_pool
    for layer_id in pool.layer_ids:
        for what, rows in zip(("K", "V"), pool.get_kv_buffer(layer_id), strict=True):
            sizes = zip(rows.shape, rows.stride(), strict=True)
            reach = 1 + sum((size - 1) * stride for size, stride in sizes)
            check_reach(context.device, reach, f"{what} of layer {layer_id}")


def _rows(q: torch.Tensor, plan: Plan, layer: LayerSpec) -> torch.Tensor:
    """[T, Hq, D] as [N, Hkv, G * size, D]: heads of a group are rows, one query after another."""
    group = layer.tp_q_head_num // layer.tp_k_head_num
    tiled = q.detach().index_select(0, plan.tokens)
    tiled = tiled.view(-1, plan.tile_size, layer.tp_k_head_num, group, q.shape[-1])
    return tiled.permute(0, 2, 3, 1, 4).reshape(
        tiled.shape[0], layer.tp_k_head_num, group * plan.tile_size, q.shape[-1]
    )


def _unrows(rows: torch.Tensor, plan: Plan, layer: LayerSpec) -> torch.Tensor:
    """[N, Hkv, G * size, n] as [T, Hq, n]."""
    group = layer.tp_q_head_num // layer.tp_k_head_num
    width = rows.shape[-1]
    tiled = rows.reshape(rows.shape[0], layer.tp_k_head_num, group, plan.tile_size, width)
    tokens = tiled.permute(0, 3, 1, 2, 4).reshape(-1, layer.tp_q_head_num, width)
    return tokens.index_select(0, plan.places)
