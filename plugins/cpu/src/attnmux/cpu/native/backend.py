"""The contract on top of one C++ function, which attends over rows wherever their slots are.

A step's ranges of keys and slots are prepared once (`spans.py` finds them); each layer
is then one call, whose work torch's threads share.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attnmux.core import AttentionBackend, AttnmuxError, ForwardMode, InvalidInput
from attnmux.core.plugin import cu_seqlens
from attnmux.cpu.native.library import TYPES, Call, Keys, load
from attnmux.cpu.spans import slots_of, spans_of, visibility
from attnmux.cpu.steps import KeyRule, StepLens, keys_and_values

if TYPE_CHECKING:
    from attnmux.core import AttentionCall, BackendContext, ForwardBatch, LayerSpec

FIXED_SPLIT = 1024
"""Keys of a part if `deterministic` is set: the cuts must not follow the batch."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Ranges:
    """A step's keys for the layers that share a rule and a group of the pool, on the CPU."""

    native: Keys
    """Points into the tensors."""
    tensors: tuple[object, ...]
    """Kept alive."""

    @classmethod
    def of(
        cls,
        rule: KeyRule,
        layer: LayerSpec,
        batch: ForwardBatch,
        lens: StepLens,
        context: BackendContext,
    ) -> Ranges:
        visible = visibility(rule, batch, lens)
        qo_indptr = cu_seqlens(lens.new)
        spans = spans_of(visible, qo_indptr)
        slots = slots_of(spans, rule, layer, batch, lens, context).int().contiguous()
        native = Keys(
            qo_indptr=qo_indptr.data_ptr(),
            span_indptr=spans.indptr.data_ptr(),
            span_start=spans.start.data_ptr(),
            slots=slots.data_ptr(),
            first=visible.first.data_ptr(),
            end=visible.end.data_ptr(),
            num_requests=len(spans.start),
        )
        if visible.item is not None:
            native.hidden_from, native.hidden_to = (tensor.data_ptr() for tensor in visible.item)
        if visible.mask is not None:
            native.mask = visible.mask.keep.data_ptr()
            native.mask_row = visible.mask.row.data_ptr()
            native.mask_start = visible.mask.start.data_ptr()
        return cls(native=native, tensors=(qo_indptr, spans, slots, visible))


class NativeBackend(AttentionBackend):
    """MHA, GQA and absorbed MLA on a CPU, with any page size."""

    def __init__(
        self, context: BackendContext, options: Mapping[str, object] = AttentionBackend.NO_OPTIONS
    ) -> None:
        """Raises BackendFailed if the kernels cannot be compiled, InvalidInput for pools and
        layers that they do not serve."""
        super().__init__(context, options)
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
        self._kernel = load(context.platform)
        self._split = FIXED_SPLIT if context.request.deterministic else 0
        self._lens: StepLens | None = None
        self._ranges: dict[int, Ranges] = {}
        self._rules: dict[tuple[int, bool], tuple[LayerSpec, KeyRule, int]] = {}
        # Rules are numbered, as their hash takes longer than the rest of a look-up in each call.
        self._numbers: dict[tuple[KeyRule, int], int] = {}

    def init_forward_metadata_out_graph(
        self, batch: ForwardBatch, in_capture: bool = False
    ) -> None:
        """Prepare the step for every layer whose K and V are in the pool."""
        self._ranges.clear()
        self._lens = None
        if batch.forward_mode is ForwardMode.IDLE:
            return
        self._lens = StepLens.on_host(batch)
        for layer in self.context.layers:
            if layer.layer_id in self.context.token_to_kv_pool.layer_ids:
                self._ranges_of(layer, batch, in_call=False)

    def forward_decode(self, call: AttentionCall, batch: ForwardBatch) -> torch.Tensor:
        return self._attend(call, batch, in_call=False)

    def forward_extend(self, call: AttentionCall, batch: ForwardBatch) -> torch.Tensor:
        return self._attend(call, batch, in_call=call.has_own_kv)

    def _attend(self, call: AttentionCall, batch: ForwardBatch, *, in_call: bool) -> torch.Tensor:
        ranges = self._ranges_of(call.layer, batch, in_call=in_call)
        layer, pool, q = call.layer, self.context.token_to_kv_pool, call.q
        keys, values = keys_and_values(call, pool, in_call=in_call)
        keys = _rows(keys)
        out = call.out
        if out is None or out.stride(-1) != 1:
            out = q.new_empty((q.shape[0], layer.tp_q_head_num, layer.v_head_dim))
        scales = (1.0, 1.0) if in_call else pool.read_scales(layer.k_scale, layer.v_scale)
        (q_token, q_head, _), (k_slot, k_head, _) = q.stride(), keys.stride()
        out_token, out_head, _ = out.stride()
        native = Call(
            keys=ranges.native,
            q=q.data_ptr(),
            k=keys.data_ptr(),
            out=out.data_ptr(),
            q_token=q_token,
            q_head=q_head,
            k_slot=k_slot,
            k_head=k_head,
            out_token=out_token,
            out_head=out_head,
            num_tokens=q.shape[0],
            num_heads=layer.tp_q_head_num,
            num_kv_heads=layer.tp_k_head_num,
            D=layer.query_dim,
            rope=layer.qk_rope_head_dim,
            Dv=layer.v_head_dim,
            q_type=TYPES[q.dtype],
            kv_type=TYPES[keys.dtype],
            scaling=layer.scaling * scales[0],
            cap=layer.logit_cap,
            v_scale=scales[0 if values is None else 1],
            split=self._split,
            num_threads=torch.get_num_threads(),
        )
        if values is not None:
            values = _rows(values)
            native.v, native.v_slot, native.v_head = values.data_ptr(), *values.stride()[:2]
        if call.q_rope is not None:
            rope = call.q_rope
            native.q_rope, native.rope_token, native.rope_head = rope.data_ptr(), *rope.stride()[:2]
        if call.lse is not None:
            native.lse, native.lse_token, native.lse_head = call.lse.data_ptr(), *call.lse.stride()
        if layer.sinks is not None:
            native.sinks = layer.sinks.data_ptr()
        self._kernel(native)
        return out

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
            ranges = Ranges.of(rule, layer, batch, self._lens, self.context)
            self._ranges[number] = ranges
        return ranges


def _rows(cache: torch.Tensor) -> torch.Tensor:
    """[n, Hkv, D] whose values of a head are next to each other."""
    return cache if cache.stride(-1) == 1 else cache.contiguous()
