"""The contract, served by plain torch operations.

An example of a small backend: the step is prepared on the host (`metadata.py`), each layer then
runs the same tiles over its own K and V (`attend.py`). No graphs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from attnmux.core.backend import NO_OPTIONS, AttentionBackend
from attnmux.core.batch import ForwardMode
from attnmux.core.call import AttentionCall
from attnmux.core.context import BackendContext
from attnmux.core.errors import AttnmuxError
from attnmux.core.indices import cu_seqlens, token_rows, topk_slots
from attnmux.cpu.steps import KeyRule, StepLens
from attnmux.cpu.torch_native.attend import Operands, attend
from attnmux.cpu.torch_native.metadata import Plan, TileSize, make_plan
from attnmux.cpu.torch_native.picked import attend_picked
from attnmux.cpu.torch_native.widening import Widening

if TYPE_CHECKING:
    from attnmux.core.batch import ForwardBatch
    from attnmux.core.layer import LayerSpec


class TorchNativeBackend(AttentionBackend):
    """Every feature of the contract, any page size, any device of torch's."""

    def __init__(self, context: BackendContext, options: Mapping[str, object] = NO_OPTIONS) -> None:
        super().__init__(context, options)
        self._lens: StepLens | None = None
        self._plans: dict[tuple[KeyRule, TileSize, int], Plan] = {}
        self._widenings: dict[torch.dtype, Widening] = {}

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
            if in_pool and _picks(layer, batch) is None:
                self._plan(layer, batch, in_call=False)

    def forward_decode(self, call: AttentionCall, batch: ForwardBatch) -> torch.Tensor:
        return self._attend(call, *self._from_pool(call.layer), batch)

    def forward_extend(self, call: AttentionCall, batch: ForwardBatch) -> torch.Tensor:
        if call.k is None or call.save_kv_cache:
            return self.forward_decode(call, batch)
        if call.k_rope is not None:
            return self._attend(call, torch.cat([call.k, call.k_rope], dim=-1), None, batch)
        return self._attend(call, call.k, call.v, batch)

    def _from_pool(self, layer: LayerSpec) -> tuple[torch.Tensor, torch.Tensor | None]:
        pool = self.context.token_to_kv_pool
        keys = pool.get_key_buffer(layer.layer_id)
        return keys, None if layer.kind == "mla" else pool.get_value_buffer(layer.layer_id)

    def _attend(
        self,
        call: AttentionCall,
        keys: torch.Tensor,
        values: torch.Tensor | None,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        """Attend over keys [n, Hkv, D] and values [n, Hkv, Dv], which the plan's slots index."""
        q, layer, lse = call.q, call.layer, call.lse
        pool, in_call = self.context.token_to_kv_pool, call.has_own_kv
        scales = (1.0, 1.0) if in_call else pool.read_scales(layer.k_scale, layer.v_scale)
        out = call.out
        if out is None:
            out = q.new_empty((q.shape[0], layer.tp_q_head_num, layer.v_head_dim))
        picks = _picks(layer, batch)
        if picks is not None:
            places = self._places(picks, layer, batch, in_call=in_call)
            return self._attend_picked(call, keys, places, scales[0], out)
        plan = self._plan(layer, batch, in_call=in_call)
        dtype = _product_dtype(q.dtype, keys.dtype)
        operands = Operands(
            layer=layer,
            q=q.detach(),
            q_rope=None if call.q_rope is None else call.q_rope.detach(),
            keys=_rows_of_heads(keys),
            values=None if values is None else _rows_of_heads(values),
            scales=scales,
            dtype=dtype,
            widening=self._widening(keys.dtype, dtype),
            workspace=self.context.workspace,
        )
        for tile in plan.tiles:
            of_tile, lse_of_tile = attend(operands, tile, plan.visibility)
            out[tile.tokens] = of_tile.to(out.dtype)
            if lse is not None:
                lse[tile.tokens] = lse_of_tile
        if plan.keyless.numel():
            out[plan.keyless] = 0
            if lse is not None:
                lse[plan.keyless] = -torch.inf if layer.sinks is None else layer.sinks
        return out

    def _attend_picked(
        self,
        call: AttentionCall,
        keys: torch.Tensor,
        places: torch.Tensor,
        scale: float,
        out: torch.Tensor,
    ) -> torch.Tensor:
        """Attend over the rows `places` [T, topk] of keys [n, 1, D]."""
        layer = call.layer
        q = call.q if call.q_rope is None else torch.cat([call.q, call.q_rope], dim=-1)
        blocks = attend_picked(
            q, _rows_of_heads(keys), places, rank=layer.v_head_dim, scaling=layer.scaling * scale
        )
        for rows, of_block, lse_of_block in blocks:
            out[rows] = (of_block * scale).to(out.dtype)
            if call.lse is not None:
                call.lse[rows] = lse_of_block
        return out

    def _places(
        self, picks: torch.Tensor, layer: LayerSpec, batch: ForwardBatch, *, in_call: bool
    ) -> torch.Tensor:
        """[T, topk]: where the keys that were picked are, in the pool's buffer or the call's K."""
        new = batch.extend_seq_lens
        if in_call and new is not None:
            starts = token_rows(cu_seqlens(new)[:-1].long(), new, batch.num_tokens)
            return torch.where(picks < 0, -1, starts.unsqueeze(1) + picks)
        rows = batch.req_pool_indices
        if new is not None:
            rows = token_rows(rows, new, batch.num_tokens)
        slots = topk_slots(self.context.req_to_token_pool.req_to_token, rows, picks)
        translated = self.context.token_to_kv_pool.translate(slots.clamp(min=0), layer.layer_id)
        return torch.where(slots < 0, -1, translated)

    def _widening(self, source: torch.dtype, target: torch.dtype) -> Widening | None:
        """The conversion of 8-bit floats, made once; None for other dtypes."""
        if source.itemsize > 1:
            return None
        widening = self._widenings.get(target)
        if widening is None:
            widening = self._widenings[target] = Widening(source, target, self.context.device)
        return widening

    def tile_size(self, layer: LayerSpec) -> TileSize:
        """How much of the step to compute at once: what bounds the scratch memory."""
        return TileSize.of(layer, self.context.device)

    def _plan(self, layer: LayerSpec, batch: ForwardBatch, *, in_call: bool) -> Plan:
        """The step's plan for the layer, made by the first of the layers that share it."""
        if self._lens is None:
            raise AttnmuxError("no step is prepared: call init_forward_metadata(batch) first")
        rule = KeyRule.of(layer, in_call=in_call)
        size = self.tile_size(layer)
        # The call's own k and v have no slots, whatever the pool.
        group = 0 if in_call else self.context.token_to_kv_pool.group_of(layer.layer_id)
        plan = self._plans.get((rule, size, group))
        if plan is None:
            plan = make_plan(rule, size, layer, batch, self._lens, self.context)
            self._plans[rule, size, group] = plan
        return plan


def _picks(layer: LayerSpec, batch: ForwardBatch) -> torch.Tensor | None:
    """What the layer's indexer says which keys it sees by; None for a layer without one."""
    return batch.topk_indices if layer.kind == "mla" else None


def _rows_of_heads(cache: torch.Tensor) -> torch.Tensor:
    """[n, Hkv, D] as [n * Hkv, D]."""
    return cache.detach().reshape(-1, cache.shape[-1])


def _product_dtype(queries: torch.dtype, keys: torch.dtype) -> torch.dtype:
    """The dtype that Q, K, V and the softmax's weights are multiplied in.

    An 8-bit float is a bfloat16 and a float16 as well, so it leaves Q's dtype as it is.
    """
    dtype = queries if keys.itemsize == 1 else torch.promote_types(queries, keys)
    # An unscaled logit may overflow fp16, and a CPU multiplies it ten times slower than fp32.
    return torch.float32 if dtype == torch.float16 else dtype
