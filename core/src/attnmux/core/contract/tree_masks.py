"""The forms of a draft tree's mask, and each of them from the others.

The names of the forms are SGLang's (`TreeMaskMode`). Everything but `check_trees` has static shapes
and does not synchronise, so that graphs can hold it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.nn.functional import pad

from attnmux.core.contract.batch import ForwardBatch
from attnmux.core.contract.spec import FORMS, SpecInput, mask_bounds, whole_mask
from attnmux.core.facts.errors import InvalidInput
from attnmux.core.facts.values import TreeMask


def pack_visible(visible: torch.Tensor) -> torch.Tensor:
    """`SpecInput.visible_bits` from `SpecInput.visible`."""
    size, drafts, _ = visible.shape
    by_byte = pad(visible, (0, -drafts % 8)).view(size, drafts, -1, 8).to(torch.uint8)
    order = torch.arange(8, dtype=torch.uint8, device=visible.device)
    return (by_byte << order).sum(-1, dtype=torch.uint8)


def draft_depths(visible: torch.Tensor) -> torch.Tensor:
    """[B, d] int32: the edges from the root to each draft of a tree; 0 for padding that sees itself
    alone. visible: as on `SpecInput`."""
    return visible.sum(-1, dtype=torch.int32) - 1


def limited_drafts(
    visible: torch.Tensor, prefix_lens: torch.Tensor, *, window: int, chunk: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Masks of draft trees in a layer with a window or attention chunks, which count positions.

    A draft's position is the prefix's length plus its depth. visible: as on `SpecInput`.
    prefix_lens: [B] int. window, chunk: as `LayerSpec.sliding_window_size` and
    `attention_chunk_size`.
    Returns the visible drafts, [B, d, d] bool, and the first visible key of the prefix, [B, d]
    of prefix_lens' dtype.
    """
    position = draft_depths(visible).to(prefix_lens.dtype) + prefix_lens.unsqueeze(1)
    first = torch.zeros_like(position)
    if window >= 0:
        first = (position - window).clamp_(min=0)
    if chunk > 0:
        first = torch.maximum(first, position - position % chunk)
    if window < 0 and chunk <= 0:
        return visible, first
    return visible & (position.unsqueeze(1) >= first.unsqueeze(2)), first


def with_form(batch: ForwardBatch, form: TreeMask, *, max_context_len: int) -> ForwardBatch:
    """The verify step with its mask in a form, in new memory unless it has that form.

    A whole mask has room for requests of max_context_len tokens if the host does not know the
    lengths.
    """
    spec = batch.spec_info
    if spec is None or spec.tree_mask in (None, form):
        return batch
    visible, drafts = batch.visible_drafts(), spec.draft_token_num
    if form == "qlen_only":
        return replace(batch, spec_info=with_mask(spec, visible=visible))
    if form == "qlen_only_bitpacking":
        return replace(batch, spec_info=with_mask(spec, visible_bits=pack_visible(visible)))
    size, total = batch.batch_size, batch.seq_lens_sum
    lens = batch.seq_lens if batch.seq_lens.is_cpu else batch.seq_lens_cpu
    if lens is not None:
        total = int(lens.sum())
    if total is None:
        total = size * max_context_len
    mask = whole_mask(visible, batch.seq_lens, total=drafts * (total + size * drafts))
    bounds = mask_bounds(batch.seq_lens, drafts)
    return replace(batch, spec_info=with_mask(spec, custom_mask=mask, mask_indptr=bounds))


def with_mask(spec: SpecInput, **fields: torch.Tensor) -> SpecInput:
    """With these fields, instead of any other form of the mask."""
    none: dict[str, Any] = dict.fromkeys((*FORMS, "mask_indptr"))
    return replace(spec, **{**none, **fields})


def check_trees(batch: ForwardBatch) -> None:
    """Refuse masks that are no trees: a hidden prefix, a draft that does not see itself, that sees
    a later one, or that sees another without its ancestors. Synchronises.

    A whole mask has the size that `check_batch` demands. Raises InvalidInput with the field.
    """
    spec, form = batch.spec_info, batch.tree_mask
    if spec is None or form is None:
        return
    visible = batch.visible_drafts()
    hidden = ~visible.diagonal(dim1=1, dim2=2).all(-1)
    steps = visible.float()
    skips = (((steps @ steps) > 0) & ~visible).flatten(1).any(-1)
    later = visible.triu(1).flatten(1).any(-1)
    faults = [
        ("a draft token hidden from itself", hidden),
        ("a draft that sees a later one", later),
        ("a draft that sees another, but not all of its ancestors", skips),
    ]
    if form == "full":
        faults.insert(0, ("cached tokens hidden from drafts", _hides_prefix(batch)))
    if form == "qlen_only_bitpacking":
        packed = spec.visible_bits
        assert packed is not None
        faults.append(("bits after the last draft", (pack_visible(visible) != packed).any((1, 2))))
    for got, wrong in faults:
        if bool(wrong.any()):
            raise InvalidInput(
                f"spec_info.{spec.mask_field}",
                got=f"{got} in request {int(wrong.nonzero()[0])} of the batch",
                expected="the mask of a draft tree, which hides only drafts",
            )


def _hides_prefix(batch: ForwardBatch) -> torch.Tensor:
    """[B] bool: whether a whole mask hides a token of the request's prefix."""
    spec = batch.drafts()
    drafts = spec.draft_token_num
    assert spec.custom_mask is not None
    bounds, hides = mask_bounds(batch.seq_lens, drafts).tolist(), []
    for start, length in zip(bounds, batch.seq_lens.tolist(), strict=False):
        rows = spec.custom_mask[start : start + drafts * (length + drafts)]
        hides.append(not bool(rows.view(drafts, -1)[:, :length].all()))
    return torch.tensor(hides)
