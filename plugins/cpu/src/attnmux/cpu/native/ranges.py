"""A step's keys for the layers that share a rule and a group of the pool, for the kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attnmux.core.plugin import cu_seqlens
from attnmux.cpu.native.library import Keys, Layout, load_lay_out
from attnmux.cpu.spans import slots_of, spans_of, visibility

if TYPE_CHECKING:
    from attnmux.core import BackendContext, ForwardBatch, LayerSpec
    from attnmux.cpu.steps import KeyRule, StepLens


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Ranges:
    """On the CPU."""

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


class PlainRanges:
    """Ranges of steps without masks, items and encoders, made in one C++ call."""

    def __init__(self, context: BackendContext) -> None:
        """Raises BackendFailed if the kernels cannot be compiled."""
        self._context = context
        self._lay_out = load_lay_out(context.platform)
        self._most_slots = 0

    def of(
        self, rule: KeyRule, layer: LayerSpec, batch: ForwardBatch, lens: StepLens
    ) -> Ranges | None:
        """None for other steps, and for keys that the request table does not have."""
        is_plain = batch.spec_info is None and batch.multi_item is None
        if rule.in_call or rule.is_cross or not is_plain:
            return None
        pool = self._context.token_to_kv_pool
        table, page = self._context.req_to_token_pool.columns_for(pool.page_size)
        lengths = lens.new, lens.cached, lens.encoder
        if not table.is_contiguous() or any(length.dtype != torch.int32 for length in lengths):
            return None
        size, num_tokens = len(lens.new), batch.num_tokens
        ints = torch.empty(3 * size + 2, dtype=torch.int32)
        bounds = torch.empty(2, num_tokens, dtype=torch.int64)
        start, rows = ints.data_ptr(), batch.req_pool_indices.contiguous()
        new, cached, encoder = (each.contiguous() for each in lengths)
        native = Keys(
            qo_indptr=start,
            span_indptr=start + 4 * (size + 1),
            span_start=start + 8 * (size + 1),
            first=bounds.data_ptr(),
            end=bounds.data_ptr() + 8 * num_tokens,
            num_requests=size,
        )
        layout = Layout(
            new_lens=new.data_ptr(),
            cached=cached.data_ptr(),
            encoder=encoder.data_ptr(),
            rows=rows.data_ptr(),
            table=table.data_ptr(),
            num_rows=table.shape[0],
            num_columns=table.shape[1],
            page=page,
            num_requests=size,
            num_tokens=num_tokens,
            window=rule.window,
            chunk=rule.chunk,
            is_causal=rule.is_causal,
            **{name: getattr(native, name) for name in ("qo_indptr", "span_indptr", "span_start")},
            **{name: getattr(native, name) for name in ("first", "end")},
        )
        total = self._most_slots
        slots = torch.empty(0, dtype=torch.int32)
        while total > slots.numel() or not layout.slots:
            slots = torch.empty(max(total, 1), dtype=torch.int32)
            layout.slots, layout.room = slots.data_ptr(), slots.numel()
            total = self._lay_out(layout)
        if total < 0:
            return None
        self._most_slots = max(self._most_slots, total)
        slots = pool.translate(slots[:total], layer.layer_id).int().contiguous()
        native.slots = slots.data_ptr()
        return Ranges(native=native, tensors=(ints, bounds, slots))
