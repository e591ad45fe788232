"""A draft tree's mask as keys: each draft token is a request of one query, over what it sees.

The mask hides draft tokens alone. The prefix, which every draft token sees, is not part of these
keys: attention to it is a call of its own, and both are merged.
"""

from __future__ import annotations

import torch

from attnmux.core.backend import BackendContext
from attnmux.core.batch import ForwardBatch
from attnmux.core.errors import GraphUnsupported, InvalidInput
from attnmux.core.indices import mask_indptr, verify_kv_lens
from attnmux.core.spec import SpecInput
from attnmux.nvidia.page_tables import KeyGroup, Keys


def visible_drafts(batch: ForwardBatch) -> torch.Tensor:
    """[B, d, d] bool: which draft tokens each draft token sees, by the mask of TARGET_VERIFY."""
    spec, mask = _masked(batch)
    drafts = torch.arange(spec.draft_token_num, device=mask.device)
    columns = batch.seq_lens.long()[:, None, None] + drafts
    rows = drafts[:, None] * _widths(batch, spec)[:, None, None]
    return mask[_starts(batch, spec)[:, None, None] + rows + columns]


def draft_keys(
    batch: ForwardBatch,
    visible: torch.Tensor,
    group: KeyGroup,
    context: BackendContext,
    *,
    out: Keys | None = None,
) -> Keys:
    """Slots of what each draft token sees among the drafts: a table [B·d, d] and lengths [B·d].

    visible: as `visible_drafts` gives it. out: buffers of `draft_buffers`, whose front is written.
    Shapes are static and nothing is read on the host.
    """
    batch_size, count, _ = visible.shape
    slots = context.token_to_kv_pool.translate(batch.out_cache_loc, group.layer_id).int()
    places = visible.cumsum(-1) - 1
    # What is hidden goes to a column of its own, which is cut off.
    table = slots.new_zeros((batch_size, count, count + 1))
    table.scatter_(
        2,
        places.masked_fill(~visible, count),
        slots.view(batch_size, 1, count).expand(-1, count, -1),
    )
    table, lens = table[..., :count].flatten(0, 1), visible.sum(-1, dtype=torch.int32).flatten()
    if out is None:
        return Keys(page_table=table, lens=lens)
    rows = batch_size * count
    return Keys(
        page_table=out.page_table[:rows, :count].copy_(table), lens=out.lens[:rows].copy_(lens)
    )


def draft_buffers(
    held: Keys | None, max_num_tokens: int, max_drafts: int, context: BackendContext
) -> Keys:
    """What graphs of up to max_num_tokens draft tokens, max_drafts a request, are captured with.

    held: what earlier graphs were; given back where it is large enough.
    """
    rows, width = max_num_tokens, max_drafts
    if held is not None:
        rows, width = max(rows, held.page_table.shape[0]), max(width, held.page_table.shape[1])
        if held.page_table.shape == (rows, width):
            return held
    table = torch.zeros((rows, width), dtype=torch.int32, device=context.device)
    return Keys(page_table=table, lens=torch.zeros_like(table[:, 0]))


def check_room(buffers: Keys, num_tokens: int, drafts: int) -> None:
    """Raises GraphUnsupported for a captured tree that the buffers do not hold."""
    rows, width = buffers.page_table.shape
    if num_tokens > rows or drafts > width:
        raise GraphUnsupported(
            f"a tree of {drafts} drafts a request, {num_tokens} in all, is captured with buffers "
            f"for {width} and {rows}: call init_cuda_graph_state with the largest first"
        )


def check_tree(batch: ForwardBatch) -> None:
    """Raises InvalidInput for a mask that is not a draft tree's: one that hides a token of the
    prefix from a draft token, or a draft token from itself. Synchronises with the device."""
    spec, mask = _masked(batch)
    if not bool(visible_drafts(batch).diagonal(dim1=1, dim2=2).all()):
        raise InvalidInput(
            "spec_info.custom_mask", came="a draft token hidden from itself", expected="a tree's"
        )
    starts, widths = _starts(batch, spec).tolist(), _widths(batch, spec).tolist()
    for request, (start, width) in enumerate(zip(starts, widths, strict=True)):
        rows = mask[start : start + spec.draft_token_num * width].view(-1, width)
        if not bool(rows[:, : width - spec.draft_token_num].all()):
            raise InvalidInput(
                "spec_info.custom_mask",
                came=f"cached tokens hidden from drafts of request {request} in the batch",
                expected="a tree's, which hides drafts alone",
            )


def _masked(batch: ForwardBatch) -> tuple[SpecInput, torch.Tensor]:
    spec = batch.spec_info
    if spec is None or spec.custom_mask is None:
        raise InvalidInput("spec_info.custom_mask", came=None, expected="a draft tree's mask")
    return spec, spec.custom_mask


def _widths(batch: ForwardBatch, spec: SpecInput) -> torch.Tensor:
    """[B] int64: values of a row of each request's mask, its keys."""
    return verify_kv_lens(batch.seq_lens, spec.draft_token_num).long()


def _starts(batch: ForwardBatch, spec: SpecInput) -> torch.Tensor:
    """[B] int64: where each request's part of the mask begins."""
    indptr = spec.mask_indptr
    if indptr is None:
        indptr = mask_indptr(
            spec.draft_token_num, verify_kv_lens(batch.seq_lens, spec.draft_token_num)
        )
    return indptr[:-1].long()
