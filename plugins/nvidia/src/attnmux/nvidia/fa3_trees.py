"""A draft tree's mask as keys: each draft token is a request of one query, over what it sees.

The mask hides draft tokens alone. The prefix, which every draft token sees, is not part of these
keys: attention to it is a call of its own, and both are merged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from attnmux.core.batch import ForwardBatch
from attnmux.core.context import BackendContext
from attnmux.core.errors import GraphUnsupported, InvalidInput
from attnmux.core.indices import mask_indptr, verify_kv_lens
from attnmux.core.spec import SpecInput
from attnmux.nvidia.page_tables import KeyGroup, Keys


class DraftTables:
    """What a tree's drafts attend to of each other, for every group of layers."""

    def __init__(self, groups: tuple[KeyGroup, ...], context: BackendContext) -> None:
        self._groups, self._context = groups, context
        self._room = (0, 0)
        self._fixed: dict[KeyGroup, Keys] = {}
        self._outgrown: list[dict[KeyGroup, Keys]] = []
        self._buffers: dict[KeyGroup, Keys] = {}
        self.keys: dict[KeyGroup, Keys] = {}
        """Of the step: a row for each draft token."""

    def reserve(self, max_batch_size: int, max_num_tokens: int) -> None:
        """Make buffers for graphs of up to that size, with as many drafts of each request."""
        needed = max_num_tokens, -(-max_num_tokens // max(max_batch_size, 1))
        room = max(needed[0], self._room[0]), max(needed[1], self._room[1])
        if room != self._room:
            self._outgrown.append(self._fixed)
            self._fixed = {group: self._made(room) for group in self._groups}
            self._room = room

    def begin(self, batch: ForwardBatch, *, in_capture: bool) -> None:
        """Decide on the host where the tables of a step will lie.

        Raises GraphUnsupported for a captured tree that the buffers do not hold, in debug mode
        InvalidInput for a mask that is not a tree's.
        """
        if self._context.debug:
            check_tree(batch)
        self.keys = {}
        self._buffers = self._fixed if in_capture else {}
        needed = batch.num_tokens, _masked(batch)[0].draft_token_num
        if in_capture and (needed[0] > self._room[0] or needed[1] > self._room[1]):
            raise GraphUnsupported(
                f"a tree of {needed[1]} drafts a request, {needed[0]} in all, is captured with "
                f"buffers for {self._room[1]} and {self._room[0]}: call init_cuda_graph_state with "
                "the largest first"
            )

    def fill(self, batch: ForwardBatch) -> None:
        """Build the tables on the device: static shapes, nothing is read on the host."""
        visible = visible_drafts(batch)
        for group in self._groups:
            table, lens = draft_keys(batch, visible, group, self._context)
            buffers = self._buffers.get(group)
            if buffers is not None:
                rows, columns = table.shape
                table = buffers.page_table[:rows, :columns].copy_(table)
                lens = buffers.lens[:rows].copy_(lens)
            self.keys[group] = Keys(page_table=table, lens=lens)

    def _made(self, room: tuple[int, int]) -> Keys:
        table = torch.zeros(room, dtype=torch.int32, device=self._context.device)
        return Keys(page_table=table, lens=torch.zeros_like(table[:, 0]))


def visible_drafts(batch: ForwardBatch) -> torch.Tensor:
    """[B, d, d] bool: which draft tokens each draft token sees, by the mask of TARGET_VERIFY."""
    spec, mask = _masked(batch)
    drafts = torch.arange(spec.draft_token_num, device=mask.device)
    columns = batch.seq_lens.long()[:, None, None] + drafts
    rows = drafts[:, None] * _widths(batch, spec)[:, None, None]
    return mask[_starts(batch, spec)[:, None, None] + rows + columns]


def draft_keys(
    batch: ForwardBatch, visible: torch.Tensor, group: KeyGroup, context: BackendContext
) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots of what each draft token sees among the drafts: a table [B·d, d] and lengths [B·d].

    visible: as `visible_drafts` gives it.
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
    return table[..., :count].flatten(0, 1), visible.sum(-1, dtype=torch.int32).flatten()


def merge(
    merge_state_v2: Callable[..., Any],
    out: torch.Tensor,
    prefix_lse: torch.Tensor,
    drafts: torch.Tensor,
    drafts_lse: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """Make of attention to the prefix, in `out`, attention to what each draft token sees too.

    out: [T, Hq, Dv], contiguous. prefix_lse: [B, Hq, d]. drafts: [T, 1, Hq, Dv], with drafts_lse
    [T, Hq, 1]. lse: [T, Hq], written too where it is given.
    """
    _, merged_lse = merge_state_v2(
        out,
        prefix_lse.transpose(1, 2).flatten(0, 1).contiguous(),
        drafts.squeeze(1),
        drafts_lse.squeeze(-1),
        v_merged=out,
    )
    if lse is not None:
        lse.copy_(merged_lse)


def check_tree(batch: ForwardBatch) -> None:
    """Raises InvalidInput for a mask that is not a draft tree's: one that is too short, that hides
    a token of the prefix from a draft token, or a draft token from itself. Synchronises."""
    spec, mask = _masked(batch)
    drafts = spec.draft_token_num
    starts, widths = _starts(batch, spec).tolist(), _widths(batch, spec).tolist()
    for request, (start, width) in enumerate(zip(starts, widths, strict=True)):
        rows = mask[start : start + drafts * width]
        if len(rows) < drafts * width:
            came = f"{len(rows)} values, not {drafts * width},"
        elif not bool(rows.view(drafts, width)[:, : width - drafts].all()):
            came = "cached tokens hidden from drafts"
        elif not bool(rows.view(drafts, width)[:, width - drafts :].diagonal().all()):
            came = "a draft token hidden from itself"
        else:
            continue
        raise InvalidInput(
            "spec_info.custom_mask",
            came=f"{came} in request {request} of the batch",
            expected="a draft tree's mask, which hides drafts alone",
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
