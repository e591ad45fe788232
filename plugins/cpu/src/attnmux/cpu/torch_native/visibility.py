"""Which keys each query of a step sees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attnmux.core.errors import InvalidInput
from attnmux.core.indices import extend_positions

if TYPE_CHECKING:
    from attnmux.core.batch import ForwardBatch
    from attnmux.cpu.steps import KeyRule, StepLens


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Visibility:
    """The keys of each query: a range of its sequence, less what an item or a mask hides.

    One value a token, for the T' <= T tokens of requests; the rest of T is padding.
    """

    first: torch.Tensor
    """[T'] int64: the first key in range."""
    end: torch.Tensor
    """[T'] int64: one past the last key in range. Grows within a request, as `first` does."""
    item: tuple[torch.Tensor, torch.Tensor] | None
    """Hidden between two [T'] int64: the end of the shared prefix, the start of the own item."""
    mask: tuple[torch.Tensor, torch.Tensor] | None
    """The flat custom mask, and [T'] int64: where the token's key 0 lies in it."""

    def to(self, device: torch.device) -> Visibility:
        """The same on a device; the flat mask is there already."""
        item, mask = self.item, self.mask
        return Visibility(
            first=self.first.to(device),
            end=self.end.to(device),
            item=None if item is None else (item[0].to(device), item[1].to(device)),
            mask=None if mask is None else (mask[0], mask[1].to(device)),
        )

    @property
    def is_range(self) -> bool:
        """Whether the range says everything."""
        return self.item is None and self.mask is None

    def hidden(self, tokens: slice | torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Where a query must not look: [R, Tq, S] bool.

        tokens: R * Tq rows of the step, R times Tq of them. keys: [R, S] int64, positions.
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
            keep, row_start = self.mask
            # A key behind the request's last is hidden already; its place may be outside.
            places = (of_tokens(row_start) + keys).clamp_(max=keep.numel() - 1)
            hidden |= ~keep[places]
        return hidden


def visibility(rule: KeyRule, batch: ForwardBatch, lens: StepLens) -> Visibility:
    """What each query sees under a rule, on the host but for the flat mask.

    Raises InvalidInput for a custom mask that is not of the step's size.
    """
    new, cached = lens.new, torch.zeros_like(lens.cached) if rule.in_call else lens.cached
    num_tokens = int(new.sum())
    num_keys = lens.encoder if rule.is_cross else cached + new

    def of_requests(values: torch.Tensor) -> torch.Tensor:
        return values.long().repeat_interleave(new, output_size=num_tokens)

    position = extend_positions(cached, new, total=num_tokens)
    keep = None if batch.spec_info is None else batch.spec_info.custom_mask
    first, end = rule.bounds(position, of_requests(num_keys), masked=keep is not None)
    if rule.is_cross:
        return Visibility(first=first, end=end, item=None, mask=None)
    item = mask = None
    if batch.multi_item is not None:
        in_item = batch.multi_item.token_pos_in_items.cpu()[:num_tokens]
        item = of_requests(batch.multi_item.prefix_lens.cpu()), position - in_item
    if keep is not None:
        mask = keep, _mask_rows(keep, new, num_keys)
    return Visibility(first=first, end=end, item=item, mask=mask)


def _mask_rows(keep: torch.Tensor, new: torch.Tensor, num_keys: torch.Tensor) -> torch.Tensor:
    """[T'] int64: where each query's key 0 lies in the flat mask, which may pass 2**31 values."""
    widths = num_keys.long().repeat_interleave(new)
    ends = widths.cumsum(0)
    total = int(ends[-1]) if ends.numel() else 0
    if keep.dtype != torch.bool or keep.shape != (total,):
        raise InvalidInput(
            "custom_mask",
            came=f"{keep.dtype} of shape {tuple(keep.shape)}",
            expected=f"bool of shape ({total},), new tokens * keys of each request",
        )
    return ends - widths
