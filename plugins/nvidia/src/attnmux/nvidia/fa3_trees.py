"""The mask of a draft tree as keys: each draft token is a request with one query.

The mask hides draft tokens only. Every draft token sees the whole prefix, so attention to the
prefix is another call, and `fa3_base` merges the results of both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attnmux.core import InvalidInput, KeyGroup, Keys, mask_indptr, verify_kv_lens

if TYPE_CHECKING:
    from attnmux.core import BackendContext, ForwardBatch, SpecInput


def visible_drafts(batch: ForwardBatch) -> torch.Tensor:
    """[B, d, d] bool: which draft tokens each draft token sees, by the mask of TARGET_VERIFY."""
    spec, mask = _masked(batch)
    drafts = torch.arange(spec.draft_token_num, device=mask.device)
    columns = batch.seq_lens.long()[:, None, None] + drafts
    rows = drafts[:, None] * _widths(batch, spec)[:, None, None]
    return mask[_starts(batch, spec)[:, None, None] + rows + columns]


def draft_keys(
    batch: ForwardBatch, visible: torch.Tensor, group: KeyGroup, context: BackendContext
) -> Keys:
    """The slots that each draft token sees among the drafts: a table [B·d, d] and lengths [B·d].

    visible: the result of `visible_drafts`.
    """
    batch_size, count, _ = visible.shape
    slots = context.token_to_kv_pool.translate(batch.out_cache_loc, group.layer_id).int()
    places = visible.cumsum(-1) - 1
    # Hidden drafts go to an extra column, which is then cut off.
    table = slots.new_zeros((batch_size, count, count + 1))
    table.scatter_(
        2,
        places.masked_fill(~visible, count),
        slots.view(batch_size, 1, count).expand(-1, count, -1),
    )
    return Keys(
        page_table=table[..., :count].flatten(0, 1),
        lens=visible.sum(-1, dtype=torch.int32).flatten(),
    )


def check_tree(batch: ForwardBatch) -> None:
    """Check the mask on the host. Synchronises.

    The mask has the size that `check_batch` demands. Raises InvalidInput for a mask that hides a
    token of the prefix from a draft token, or a draft token from itself.
    """
    spec, mask = _masked(batch)
    drafts = spec.draft_token_num
    starts, widths = _starts(batch, spec).tolist(), _widths(batch, spec).tolist()
    for request, (start, width) in enumerate(zip(starts, widths, strict=True)):
        rows = mask[start : start + drafts * width]
        if not bool(rows.view(drafts, width)[:, : width - drafts].all()):
            got = "cached tokens hidden from drafts"
        elif not bool(rows.view(drafts, width)[:, width - drafts :].diagonal().all()):
            got = "a draft token hidden from itself"
        else:
            continue
        raise InvalidInput(
            "spec_info.custom_mask",
            got=f"{got} in request {request} of the batch",
            expected="the mask of a draft tree, which hides only drafts",
        )


def _masked(batch: ForwardBatch) -> tuple[SpecInput, torch.Tensor]:
    spec = batch.spec_info
    if spec is None or spec.custom_mask is None:
        raise InvalidInput("spec_info.custom_mask", got=None, expected="the mask of a draft tree")
    return spec, spec.custom_mask


def _widths(batch: ForwardBatch, spec: SpecInput) -> torch.Tensor:
    """[B] int64: the keys of each request, which are the length of a row of its mask."""
    return verify_kv_lens(batch.seq_lens, spec.draft_token_num).long()


def _starts(batch: ForwardBatch, spec: SpecInput) -> torch.Tensor:
    """[B] int64: where each request's part of the mask begins."""
    indptr = spec.mask_indptr
    if indptr is None:
        indptr = mask_indptr(
            spec.draft_token_num, verify_kv_lens(batch.seq_lens, spec.draft_token_num)
        )
    return indptr[:-1].long()
