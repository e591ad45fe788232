"""The contract on top of one C++ function, which attends over rows wherever their slots are.

A step's ranges of keys and slots are prepared once (`ranges.py`); each layer
is then one call, whose work torch's threads share.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from attnmux.core import AttentionBackend, AttnmuxError, ForwardMode, InvalidInput
from attnmux.cpu.native.library import TYPES, Call, load
from attnmux.cpu.native.ranges import PlainRanges, Ranges
from attnmux.cpu.native.writer import NativeWriter
from attnmux.cpu.steps import KeyRule, StepLens, keys_and_values

if TYPE_CHECKING:
    from attnmux.core import AttentionCall, BackendContext, ForwardBatch, LayerSpec

FIXED_SPLIT = 1024
"""Keys of a part if `deterministic` is set: the cuts must not follow the batch."""


class NativeBackend(AttentionBackend):
    """MHA, GQA and absorbed MLA on a CPU, with any page size."""

    def __init__(
        self, context: BackendContext, options: Mapping[str, object] = AttentionBackend.NO_OPTIONS
    ) -> None:
        """Raises BackendFailed if the kernels cannot be compiled, InvalidInput for pools and
        layers that they do not serve."""
        if context.device.type != "cpu":
            raise InvalidInput("context.device", got=context.device, expected="cpu")
        if context.token_to_kv_pool.dtype not in TYPES:
            expected = f"one of {', '.join(map(str, TYPES))}"
            got = context.token_to_kv_pool.dtype
            raise InvalidInput("context.token_to_kv_pool", got=got, expected=expected)
        for layer in context.layers:
            if layer.kind == "dual_chunk":
                expected = "layers of kind mha or mla"
                raise InvalidInput("layers", got=f"kind {layer.kind}", expected=expected)
        super().__init__(context, options)
        if self._kv_writer is None:
            self._kv_writer = NativeWriter(context)
        self._kernel = load(context.platform)
        self._plain = PlainRanges(context)
        self._split = FIXED_SPLIT if context.request.deterministic else 0
        self._lens: StepLens | None = None
        self._ranges: dict[int, Ranges] = {}
        self._rules: dict[tuple[int, bool], tuple[LayerSpec, KeyRule, int]] = {}
        # Rules are numbered, as their hash takes longer than the rest of a look-up in each call.
        self._numbers: dict[tuple[KeyRule, int], int] = {}
        self._calls: dict[int, tuple[LayerSpec, Call]] = {}
        """Calls of layers over the pool, without what each step has of its own."""
        self._ready: dict[int, tuple[LayerSpec, Call]] = {}
        """The calls whose keys are the prepared step's: a layer's call looks no further."""

    def init_forward_metadata_out_graph(
        self, batch: ForwardBatch, in_capture: bool = False
    ) -> None:
        """Prepare the step for every layer whose K and V are in the pool."""
        self._ranges.clear()
        self._ready.clear()
        self._lens = None
        if batch.forward_mode is ForwardMode.IDLE:
            return
        self._lens = StepLens.on_host(batch)
        for layer in self.context.layers:
            if layer.layer_id in self.context.token_to_kv_pool.layer_ids:
                self._over_pool(layer, batch)

    def forward_decode(self, call: AttentionCall, batch: ForwardBatch) -> torch.Tensor:
        return self._attend(call, batch, in_call=False)

    def forward_extend(self, call: AttentionCall, batch: ForwardBatch) -> torch.Tensor:
        return self._attend(call, batch, in_call=call.has_own_kv)

    def _attend(self, call: AttentionCall, batch: ForwardBatch, *, in_call: bool) -> torch.Tensor:
        layer, q, out = call.layer, call.q, call.out
        strides = (0, 0, 0) if out is None else out.stride()
        if out is None or strides[2] != 1:
            out = q.new_empty((q.shape[0], layer.tp_q_head_num, layer.v_head_dim))
            strides = out.stride()
        if in_call:
            keys, values = keys_and_values(call, self.context.token_to_kv_pool, in_call=True)
            keys, values = _rows(keys), None if values is None else _rows(values)
            native = self._of_layer(layer, keys, values, (1.0, 1.0))
            self._prepare(native, self._ranges_of(layer, batch, in_call=True))
        else:
            ready = self._ready.get(layer.layer_id)
            if ready is None or ready[0] is not layer:
                native = self._over_pool(layer, batch)
            else:
                native = ready[1]
        native.q, native.out, native.num_tokens = q.data_ptr(), out.data_ptr(), q.shape[0]
        native.q_token, native.q_head, _ = q.stride()
        native.out_token, native.out_head, _ = strides
        native.q_type = TYPES[q.dtype]
        if call.q_rope is not None:
            rope = call.q_rope
            native.q_rope, native.rope_token, native.rope_head = rope.data_ptr(), *rope.stride()[:2]
        native.lse = None if call.lse is None else call.lse.data_ptr()
        if call.lse is not None:
            native.lse_token, native.lse_head = call.lse.stride()
        self._kernel(native)
        return out

    def _over_pool(self, layer: LayerSpec, batch: ForwardBatch) -> Call:
        """A layer's call over the pool, with the step's keys."""
        ranges = self._ranges_of(layer, batch, in_call=False)
        kept = self._calls.get(layer.layer_id)
        if kept is None or kept[0] is not layer:
            pool = self.context.token_to_kv_pool
            keys = pool.get_key_buffer(layer.layer_id)
            values = None if layer.kind == "mla" else pool.get_value_buffer(layer.layer_id)
            scales = pool.read_scales(layer.k_scale, layer.v_scale)
            native = self._of_layer(layer, keys, values, scales)
            kept = self._calls[layer.layer_id] = layer, native
        self._prepare(kept[1], ranges)
        self._ready[layer.layer_id] = kept
        return kept[1]

    def _prepare(self, native: Call, ranges: Ranges) -> None:
        native.keys, native.num_threads = ranges.native, torch.get_num_threads()

    def _of_layer(
        self,
        layer: LayerSpec,
        keys: torch.Tensor,
        values: torch.Tensor | None,
        scales: tuple[float, float],
    ) -> Call:
        """The part of a call that a layer, its keys and its values decide."""
        k_slot, k_head, _ = keys.stride()
        native = Call(
            k=keys.data_ptr(),
            k_slot=k_slot,
            k_head=k_head,
            num_heads=layer.tp_q_head_num,
            num_kv_heads=layer.tp_k_head_num,
            D=layer.query_dim,
            rope=layer.qk_rope_head_dim,
            Dv=layer.v_head_dim,
            kv_type=TYPES[keys.dtype],
            scaling=layer.scaling * scales[0],
            cap=layer.logit_cap,
            v_scale=scales[0 if values is None else 1],
            split=self._split,
        )
        if values is not None:
            native.v, native.v_slot, native.v_head = values.data_ptr(), *values.stride()[:2]
        if layer.sinks is not None:
            native.sinks = layer.sinks.data_ptr()
        return native

    def _ranges_of(self, layer: LayerSpec, batch: ForwardBatch, *, in_call: bool) -> Ranges:
        """The step's ranges for a layer. The first of the layers that share them makes them."""
        if self._lens is None:
            raise AttnmuxError("no step is prepared: call init_forward_metadata(batch) first")
        known = self._rules.get((layer.layer_id, in_call))
        if known is None or known[0] is not layer:
            rule = KeyRule.of(layer, in_call=in_call)
            # The call's own k and v have no slots, so their group does not matter.
            group = 0 if in_call else self.context.token_to_kv_pool.group_of(layer.layer_id)
            number = self._numbers.setdefault((rule, group), len(self._numbers))
            known = self._rules[layer.layer_id, in_call] = layer, rule, number
        _, rule, number = known
        ranges = self._ranges.get(number)
        if ranges is None:
            ranges = self._plain.of(rule, layer, batch, self._lens)
            if ranges is None:
                ranges = Ranges.of(rule, layer, batch, self._lens, self.context)
            self._ranges[number] = ranges
        return ranges


def _rows(cache: torch.Tensor) -> torch.Tensor:
    """[n, Hkv, D] whose values of a head are next to each other."""
    return cache if cache.stride(-1) == 1 else cache.contiguous()
