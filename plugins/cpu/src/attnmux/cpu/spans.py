"""Once a step: which keys each query sees, and where the keys of each request lie."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from attnmux.core.plugin import cu_seqlens, extend_positions, kv_indices
from attnmux.cpu.steps import draft_keys, mask_starts

if TYPE_CHECKING:
    from attnmux.core import BackendContext, ForwardBatch, LayerSpec
    from attnmux.cpu.steps import DraftKeys, KeyRule, StepLens


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RowMask:
    """Keys that queries see: all before `start`, and from there on those of a flat mask."""

    keep: torch.Tensor
    """Flat bool."""
    row: torch.Tensor
    """[T'] int64: the place of the query's key 0 in it, which may lie before the mask."""
    start: torch.Tensor
    """[T'] int64: the first key that it covers: 0 in a whole mask, the prefix's end in a tree's."""

    def to(self, device: torch.device) -> RowMask:
        """A copy on a device; the flat mask is there already."""
        return replace(self, row=self.row.to(device), start=self.start.to(device))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Visibility:
    """The keys that each query sees: a range, minus those that an item or a mask hides.

    Of the step's T rows, the first T' <= T are tokens of requests; the rest is padding.
    """

    first: torch.Tensor
    """[T'] int64: the first key in range."""
    end: torch.Tensor
    """[T'] int64: one past the last key. Neither it nor `first` falls within a request."""
    place: torch.Tensor
    """[T'] int64: the query's own place among its request's keys."""
    item: tuple[torch.Tensor, torch.Tensor] | None
    """Keys from the first to the second [T'] int64 are hidden: the end of the shared prefix, the
    start of the query's own item."""
    mask: RowMask | None

    def to(self, device: torch.device) -> Visibility:
        """A copy on a device; the flat mask is there already."""
        item, mask = self.item, self.mask
        return Visibility(
            first=self.first.to(device),
            end=self.end.to(device),
            place=self.place.to(device),
            item=None if item is None else (item[0].to(device), item[1].to(device)),
            mask=None if mask is None else mask.to(device),
        )

    @property
    def is_range(self) -> bool:
        """Whether no key in range is hidden."""
        return self.item is None and self.mask is None

    def distances(self, tokens: slice | torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Places from each query to each key, [R, Tq, S] int64, below 0 for keys before it.

        tokens, keys: as in `hidden`.
        """
        return keys.unsqueeze(1) - self.place[tokens].view(keys.shape[0], -1, 1)

    def hidden(self, tokens: slice | torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Which keys the queries do not see, [R, Tq, S] bool.

        tokens: R * Tq rows of the step, request by request. keys: positions, [R, S] int64.
        """
        num_requests = keys.shape[0]

        def of_tokens(values: torch.Tensor) -> torch.Tensor:
            return values[tokens].view(num_requests, -1, 1)

        keys = keys.unsqueeze(1)
        hidden = (keys < of_tokens(self.first)) | (keys >= of_tokens(self.end))
        if self.item is not None:
            prefix_end, item_start = self.item
            hidden |= (keys >= of_tokens(prefix_end)) & (keys < of_tokens(item_start))
        if self.mask is not None:
            mask = self.mask
            # Keys outside of the mask's are hidden already, or visible.
            places = (of_tokens(mask.row) + keys).clamp_(min=0, max=mask.keep.numel() - 1)
            hidden |= ~mask.keep[places] & (keys >= of_tokens(mask.start))
        return hidden


def visibility(rule: KeyRule, batch: ForwardBatch, lens: StepLens) -> Visibility:
    """The keys that each query sees under a rule. All of it is on the host, except the flat mask.

    Raises InvalidInput for a custom mask whose size is not that of the step.
    """
    new, is_decode = lens.new, batch.forward_mode.is_decode()
    cached = torch.zeros_like(lens.cached) if rule.in_call else lens.cached
    num_tokens = len(new) if is_decode else int(new.sum())
    num_keys = lens.encoder if rule.is_cross else cached + new

    def of_requests(values: torch.Tensor) -> torch.Tensor:
        values = values.long()
        return values if is_decode else values.repeat_interleave(new, output_size=num_tokens)

    widths = of_requests(num_keys)
    position = cached.long() if is_decode else extend_positions(cached, new, total=num_tokens)
    drafts = draft_keys(rule, batch)
    if drafts is not None:
        return _of_trees(drafts, of_requests(cached), position)
    keep = None if batch.spec_info is None else batch.spec_info.custom_mask
    first, end = rule.bounds(position, widths, masked=keep is not None)
    if rule.is_cross:
        return Visibility(first=first, end=end, place=position, item=None, mask=None)
    item = mask = None
    if batch.multi_item is not None:
        in_item = batch.multi_item.token_pos_in_items.cpu()[:num_tokens]
        item = of_requests(batch.multi_item.prefix_lens.cpu()), position - in_item
    if keep is not None:
        row = of_requests(mask_starts(keep, new, num_keys))
        row += (position - of_requests(cached)) * widths
        mask = RowMask(keep=keep, row=row, start=torch.zeros_like(row))
    return Visibility(first=first, end=end, place=position, item=item, mask=mask)


def _of_trees(drafts: DraftKeys, cached: torch.Tensor, place: torch.Tensor) -> Visibility:
    """cached: [T'] int64 on the host, the length of each draft's prefix. place: of the result."""
    width = drafts.visible.shape[1]
    row = torch.arange(len(cached)) * width - cached
    return Visibility(
        first=drafts.first.flatten().cpu(),
        end=cached + width,
        place=place,
        item=None,
        mask=RowMask(keep=drafts.visible.flatten(), row=row, start=cached),
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Spans:
    """For each request, the stretch of keys that its queries see. On the host."""

    start: torch.Tensor
    """[B] int32: the position of the first key."""
    indptr: torch.Tensor
    """[B + 1] int32: where each request's keys begin among the step's slots."""


def spans_of(visible: Visibility, qo_indptr: torch.Tensor) -> Spans:
    """The stretch of each request. qo_indptr: [B + 1] int32."""
    num_tokens = visible.first.numel()
    if not num_tokens:
        none = torch.zeros_like(qo_indptr[1:])
        return Spans(start=none, indptr=torch.zeros_like(qo_indptr))
    # Requests without queries read another's, and keep nothing of them
    has_queries = qo_indptr.diff() > 0
    first = visible.first[qo_indptr[:-1].clamp(max=num_tokens - 1)]
    end = visible.end[(qo_indptr[1:] - 1).clamp_(min=0)]
    start = (first * has_queries).int()
    lens = ((end - first).clamp_(min=0) * has_queries).int()
    return Spans(start=start, indptr=cu_seqlens(lens))


def slots_of(
    spans: Spans,
    rule: KeyRule,
    layer: LayerSpec,
    batch: ForwardBatch,
    lens: StepLens,
    context: BackendContext,
) -> torch.Tensor:
    """The slots, or the rows of the call's k, of all spans' keys, one request after another."""
    total = int(spans.indptr[-1])
    if rule.in_call:
        rows = cu_seqlens(lens.encoder if rule.is_cross else lens.new)[:-1] + spans.start
        return extend_positions(rows, spans.indptr.diff(), total=total).to(context.device)
    columns = spans.start if rule.is_cross else spans.start + lens.encoder
    slots = kv_indices(
        context.req_to_token_pool,
        batch.req_pool_indices,
        spans.indptr.to(context.device),
        kv_start=columns.to(context.device),
        total=total,
    )
    return context.token_to_kv_pool.translate(slots, layer.layer_id)
