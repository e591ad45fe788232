"""Speculative decoding: the inputs of verification, and the masks of draft trees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch.nn.functional import pad

from attnmux.core.facts.values import TreeMask

FORMS: dict[str, TreeMask] = {
    "custom_mask": "full",
    "visible": "qlen_only",
    "visible_bits": "qlen_only_bitpacking",
}
"""The form of each field of `SpecInput`."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SpecInput:
    """The speculative part of a step.

    At most one of `custom_mask`, `visible` and `visible_bits` is given. Without any, drafts are
    chains. `tree_masks.py` makes each of them from the others.
    """

    draft_token_num: int
    """d: draft tokens a request, the root included."""
    topk: int = 1
    """Branches that the draft keeps at each step; 1 is a chain."""
    custom_mask: torch.Tensor | None = None
    """Flat bool, q_i * kv_i a request in batch order, True keeps. It replaces causality only."""
    mask_indptr: torch.Tensor | None = None
    """[B + 1] int32: where each request's part of `custom_mask` starts."""
    visible: torch.Tensor | None = None
    """[B, d, d] bool: the drafts that each draft of a tree sees, which are its ancestors and
    itself. It also sees the whole prefix. Its position is the prefix's length plus its depth, and
    windows and attention chunks count positions."""
    visible_bits: torch.Tensor | None = None
    """[B, d, ceil(d / 8)] uint8: `visible`, packed. Draft j is bit j % 8, the lowest first, of byte
    j // 8; bits from d on are 0."""

    @property
    def mask_field(self) -> str | None:
        """The field that has the mask; None without one."""
        return next((name for name in FORMS if getattr(self, name) is not None), None)

    @property
    def tree_mask(self) -> TreeMask | None:
        """The form of the mask; None without one."""
        return None if self.mask_field is None else FORMS[self.mask_field]

    def of_requests(self, first: int, last: int, sizes: Sequence[int] | None = None) -> SpecInput:
        """The masks of requests [first, last), as views.

        sizes: values of each request in a whole mask, which stays as it is without them.
        """
        mask, indptr = self.custom_mask, self.mask_indptr
        if mask is not None and sizes is not None:
            ends = [0, *accumulate(sizes)]
            return replace(
                self,
                custom_mask=mask[ends[first] : ends[last]],
                mask_indptr=None if indptr is None else indptr[first : last + 1] - indptr[first],
            )
        visible, bits = self.visible, self.visible_bits
        if visible is None and bits is None:
            return self
        return replace(
            self,
            visible=None if visible is None else visible[first:last],
            visible_bits=None if bits is None else bits[first:last],
        )

    def visible_drafts(self, seq_lens: torch.Tensor) -> torch.Tensor:
        """`visible`, whatever form the mask has; causal for chains. seq_lens: [B] int32, prefixes.

        It reads only the drafts' columns of a whole mask, and does not check that the prefix is
        visible.
        """
        drafts, device = self.draft_token_num, seq_lens.device
        if self.visible is not None:
            return self.visible
        if self.visible_bits is not None:
            return unpack_visible(self.visible_bits)
        if self.custom_mask is None:
            causal = torch.ones(drafts, drafts, dtype=torch.bool, device=device).tril()
            return causal.expand(len(seq_lens), drafts, drafts)
        order = torch.arange(drafts, device=device)
        prefix = seq_lens.long().view(-1, 1, 1)
        indptr = mask_bounds(seq_lens, drafts) if self.mask_indptr is None else self.mask_indptr
        starts = indptr[: len(seq_lens)].long()
        rows = starts.view(-1, 1, 1) + order.view(-1, 1) * (prefix + drafts)
        return self.custom_mask[rows + prefix + order]


def whole_mask(
    visible: torch.Tensor, seq_lens: torch.Tensor, *, total: int | None = None
) -> torch.Tensor:
    """`SpecInput.custom_mask` from `SpecInput.visible`, both on the device of seq_lens: the whole
    prefix, then the drafts that are visible, d * (seq + d) values a request.

    seq_lens: [B] int, prefix lengths. total: the number of values, or more; without it the device
    is read, which synchronises.
    """
    batch_size, num_tokens, _ = visible.shape
    rows = batch_size * num_tokens
    widths = (seq_lens.long() + num_tokens).repeat_interleave(num_tokens, output_size=rows)
    row_ends = widths.cumsum(0)
    if total is None:
        total = int(row_ends[-1]) if rows else 0
    mask = torch.ones(total, dtype=torch.bool, device=visible.device)
    if total:
        columns = torch.arange(num_tokens, device=visible.device) - num_tokens
        mask[row_ends.unsqueeze(1) + columns] = visible.reshape(-1, num_tokens)
    return mask


def unpack_visible(bits: torch.Tensor) -> torch.Tensor:
    """`SpecInput.visible` from `SpecInput.visible_bits`."""
    size, drafts, _ = bits.shape
    order = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return ((bits.unsqueeze(-1) >> order) & 1).view(size, drafts, -1)[..., :drafts].bool()


def mask_bounds(seq_lens: torch.Tensor, drafts: int) -> torch.Tensor:
    """`SpecInput.mask_indptr` of trees. seq_lens: [B] int32, prefixes."""
    return pad((drafts * (seq_lens.long() + drafts)).cumsum(0), (1, 0)).to(torch.int32)
