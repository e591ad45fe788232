"""Attention in plain torch operations: every feature of the contract, on any device.

A step is prepared on the host (`plan.py`); each layer then runs the same tiles over its own K and V
(`attend.py`). No graphs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch

from attnmux.core import AttentionBackend, AttnmuxError, ForwardMode
from attnmux.core.plugin import cu_seqlens, token_rows, topk_slots
from attnmux.cpu.steps import KeyRule, StepLens, keys_and_values
from attnmux.cpu.torch_native.attend import Operands, Widening, attend
from attnmux.cpu.torch_native.plan import Plan, TileSize, make_plan

if TYPE_CHECKING:
    from attnmux.core import AttentionCall, BackendContext, ForwardBatch, LayerSpec

GATHERED_VALUES = 2**22
"""Values of K that a sparse layer gathers at once: 16 MiB of float32."""


class TorchNativeBackend(AttentionBackend):
    """Every feature of the contract, with any page size, on any device that torch has."""

    def __init__(
        self, context: BackendContext, options: Mapping[str, object] = AttentionBackend.NO_OPTIONS
    ) -> None:
        super().__init__(context, options)
        self._lens: StepLens | None = None
        self._plans: dict[tuple[KeyRule, TileSize, int], Plan] = {}
        self._widenings: dict[torch.dtype, Widening] = {}

    def tile_size(self, layer: LayerSpec) -> TileSize:
        """How much of the step is computed at once, which bounds the scratch memory."""
        return TileSize.of(layer, self.context.device)

    def init_forward_metadata_out_graph(
        self, batch: ForwardBatch, in_capture: bool = False
    ) -> None:
        """Plan the step for every layer whose K and V are in the pool."""
        self._plans.clear()
        self._lens = None
        if batch.forward_mode is ForwardMode.IDLE:
            return
        self._lens = StepLens.on_host(batch)
        for layer in self.context.layers:
            in_pool = layer.layer_id in self.context.token_to_kv_pool.layer_ids
            if in_pool and _topk_of(layer, batch) is None:
                self._plan(layer, batch, in_call=False)

    def forward_decode(self, call: AttentionCall, batch: ForwardBatch) -> torch.Tensor:
        return self._attend(call, batch, in_call=False)

    def forward_extend(self, call: AttentionCall, batch: ForwardBatch) -> torch.Tensor:
        return self._attend(call, batch, in_call=call.has_own_kv)

    def _attend(self, call: AttentionCall, batch: ForwardBatch, *, in_call: bool) -> torch.Tensor:
        q, layer, out = call.q, call.layer, call.out
        if out is None:
            out = q.new_empty((q.shape[0], layer.tp_q_head_num, layer.v_head_dim))
        topk = _topk_of(layer, batch)
        if topk is not None:
            places = self._places(topk, layer, batch, in_call=in_call)
            return self._attend_sparse(call, places, out, in_call=in_call)
        plan = self._plan(layer, batch, in_call=in_call)
        operands = self._operands(call, in_call=in_call)
        for tile in plan.tiles:
            of_tile, lse_of_tile = attend(operands, tile, plan.visibility)
            out[tile.tokens] = of_tile.to(out.dtype)
            if call.lse is not None:
                call.lse[tile.tokens] = lse_of_tile
        if plan.keyless.numel():
            out[plan.keyless] = 0
            if call.lse is not None:
                call.lse[plan.keyless] = -torch.inf if layer.sinks is None else layer.sinks
        return out

    def _operands(self, call: AttentionCall, *, in_call: bool) -> Operands:
        layer, pool = call.layer, self.context.token_to_kv_pool
        keys, values = keys_and_values(call, pool, in_call=in_call)
        dtype = _product_dtype(call.q.dtype, keys.dtype)
        block_scales = None if in_call else pool.get_scale_buffers(layer.layer_id)
        return Operands(
            layer=layer,
            q=call.q.detach(),
            q_rope=None if call.q_rope is None else call.q_rope.detach(),
            keys=_rows_of_heads(keys),
            values=None if values is None else _rows_of_heads(values),
            scales=(1.0, 1.0) if in_call else pool.read_scales(layer.k_scale, layer.v_scale),
            dtype=dtype,
            widening=None if block_scales else self._widening(keys.dtype, dtype),
            block_scales=block_scales,
            workspace=self.context.workspace,
        )

    def _widening(self, source: torch.dtype, target: torch.dtype) -> Widening | None:
        """The conversion of 8-bit floats, made once; None for other dtypes."""
        if source.itemsize > 1:
            return None
        widening = self._widenings.get(target)
        if widening is None:
            widening = self._widenings[target] = Widening(source, target, self.context.device)
        return widening

    def _plan(self, layer: LayerSpec, batch: ForwardBatch, *, in_call: bool) -> Plan:
        """The step's plan for a layer. The first of the layers that share it makes it."""
        if self._lens is None:
            raise AttnmuxError("no step is prepared: call init_forward_metadata(batch) first")
        rule, size = KeyRule.of(layer, in_call=in_call), self.tile_size(layer)
        # The call's own k and v have no slots, so their group does not matter.
        group = 0 if in_call else self.context.token_to_kv_pool.group_of(layer.layer_id)
        plan = self._plans.get((rule, size, group))
        if plan is None:
            plan = make_plan(rule, size, layer, batch, self._lens, self.context)
            self._plans[rule, size, group] = plan
        return plan

    def _attend_sparse(
        self, call: AttentionCall, places: torch.Tensor, out: torch.Tensor, *, in_call: bool
    ) -> torch.Tensor:
        """Attend over the keys that an indexer picked: rows `places` [T, topk] of K, -1 for none.

        Computed in float32; a token without keys has out 0 and LSE -inf, or its sinks.
        """
        layer, pool = call.layer, self.context.token_to_kv_pool
        keys = _rows_of_heads(keys_and_values(call, pool, in_call=in_call)[0])
        scale = 1.0 if in_call else pool.read_scales(layer.k_scale, layer.v_scale)[0]
        scaling = layer.scaling * scale
        q = call.q if call.q_rope is None else torch.cat([call.q, call.q_rope], dim=-1)
        for rows, picked, hidden in _picked_keys(keys, places):
            logits = torch.einsum("thd,tkd->thk", q[rows].float(), picked) * scaling
            logits = logits.masked_fill(hidden.unsqueeze(1), -torch.inf)
            lse = logits.logsumexp(-1)
            if layer.sinks is not None:
                lse = torch.logaddexp(lse, layer.sinks)
            weights = torch.exp(logits - lse.masked_fill(lse.isneginf(), 0).unsqueeze(-1))
            values = picked[..., : layer.v_head_dim]
            out[rows] = (torch.einsum("thk,tkd->thd", weights, values) * scale).to(out.dtype)
            if call.lse is not None:
                call.lse[rows] = lse
        return out

    def _places(
        self, topk: torch.Tensor, layer: LayerSpec, batch: ForwardBatch, *, in_call: bool
    ) -> torch.Tensor:
        """[T, topk]: the picked keys' rows in the pool's buffer or the call's k; -1 for none."""
        new = batch.extend_seq_lens
        if in_call and new is not None:
            starts = token_rows(cu_seqlens(new)[:-1].long(), new, batch.num_tokens)
            return torch.where(topk < 0, -1, starts.unsqueeze(1) + topk)
        rows = batch.req_pool_indices
        if new is not None:
            rows = token_rows(rows, new, batch.num_tokens)
        slots = topk_slots(self.context.req_to_token_pool.req_to_token, rows, topk)
        translated = self.context.token_to_kv_pool.translate(slots.clamp(min=0), layer.layer_id)
        return torch.where(slots < 0, -1, translated)


def _picked_keys(
    keys: torch.Tensor, places: torch.Tensor
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """For a few tokens at a time: their rows, their keys [t, topk, D], which of them are none."""
    tokens = max(1, GATHERED_VALUES // max(1, places.shape[1] * keys.shape[1]))
    # torch gathers bytes on every device, 8-bit floats not on all.
    raw = keys.view(torch.uint8) if keys.itemsize == 1 else keys
    for start in range(0, len(places), tokens):
        rows = slice(start, start + tokens)
        hidden = places[rows] < 0
        picked = raw[places[rows].clamp(min=0)].view(keys.dtype).float()
        # The row read in place of no key may hold NaN.
        yield rows, picked.masked_fill(hidden.unsqueeze(-1), 0), hidden


def _topk_of(layer: LayerSpec, batch: ForwardBatch) -> torch.Tensor | None:
    """The keys that the model's indexer picked for the layer; None for a dense layer."""
    return batch.topk_indices if layer.kind == "mla" else None


def _rows_of_heads(cache: torch.Tensor) -> torch.Tensor:
    """[n, Hkv, D] as [n * Hkv, D]."""
    return cache.detach().reshape(-1, cache.shape[-1])


def _product_dtype(queries: torch.dtype, keys: torch.dtype) -> torch.dtype:
    """The dtype that Q, K, V and the softmax's weights are multiplied in.

    Q's dtype represents every value of K in 8 or 4 bits.
    """
    dtype = queries if keys.itemsize == 1 else torch.promote_types(queries, keys)
    # Logits before scaling may overflow float16, which a CPU also multiplies ten times slower.
    return torch.float32 if dtype == torch.float16 else dtype
