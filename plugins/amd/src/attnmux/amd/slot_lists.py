"""The cached keys of a step by their slots, for kernels that take lists of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attnmux.core import InvalidInput
from attnmux.core.plugin import kv_indices, kv_indptr

if TYPE_CHECKING:
    from attnmux.core import BackendContext, ForwardBatch


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SlotLists:
    """Request by request."""

    indptr: torch.Tensor
    """[B + 1] int32."""
    indices: torch.Tensor
    """[at least indptr[-1]] int32 or int64."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SlotBuffers:
    """Fixed tensors that graphs replay with."""

    indptr: torch.Tensor
    """[max_bs + 1] int32."""
    slots: torch.Tensor
    """[max_bs * max_context_len] int32."""
    hidden: torch.Tensor
    """[max_bs] bool."""

    @classmethod
    def of(cls, max_bs: int, context: BackendContext) -> SlotBuffers:
        device, most = context.device, max_bs * context.max_context_len
        return cls(
            indptr=torch.zeros(max_bs + 1, dtype=torch.int32, device=device),
            slots=torch.zeros(most, dtype=torch.int32, device=device),
            hidden=torch.zeros(max_bs, dtype=torch.bool, device=device),
        )


def slot_groups(context: BackendContext) -> dict[int, int]:
    """One of the layers of each group of the pool, whose slots are the same."""
    pool = context.token_to_kv_pool
    return {pool.group_of(number): number for number in pool.layer_ids}


def slot_lists(
    batch: ForwardBatch,
    context: BackendContext,
    groups: Mapping[int, int],
    buffers: SlotBuffers | None,
    dtype: torch.dtype = torch.int32,
    *,
    with_new: bool = False,
) -> dict[int, SlotLists]:
    """By group of the pool: the keys that are cached before the step; in decode, and with
    `with_new` in every step, also those of new tokens.

    groups: as `slot_groups` finds them. dtype: of slots. Raises InvalidInput for an extend step
    without lengths.
    """
    mode = batch.forward_mode
    has_prefix_lens = not with_new and not mode.is_decode() and not mode.is_target_verify()
    lens = batch.extend_prefix_lens if has_prefix_lens else batch.seq_lens
    on_host = batch.extend_prefix_lens_cpu if has_prefix_lens else batch.seq_lens_cpu
    if lens is None:
        raise InvalidInput("extend_prefix_lens", got=None, expected="lengths in an extend step")
    if with_new and mode.is_target_verify():
        drafts = batch.queries_each() or 0
        lens, on_host = lens + drafts, None if on_host is None else on_host + drafts
    indptr = kv_indptr(lens, out=buffers.indptr if buffers else None)
    slots = kv_indices(
        context.req_to_token_pool,
        batch.req_pool_indices,
        indptr,
        kv_start=batch.encoder_lens,
        total=None if on_host is None or buffers else int(on_host.sum()),
        out=buffers.slots if buffers else None,
    )
    pool = context.token_to_kv_pool
    return {
        group: SlotLists(indptr=indptr, indices=pool.translate(slots, number).to(dtype))
        for group, number in groups.items()
    }


def without_keys(batch: ForwardBatch, buffers: SlotBuffers | None) -> torch.Tensor | None:
    """[B, 1, 1] bool: the requests of a decode step that have no key; None if the host knows
    that all have some."""
    known = None if buffers else batch.seq_lens_cpu
    if known is not None and bool(known.all()):
        return None
    room = buffers.hidden[: batch.batch_size] if buffers else None
    return torch.eq(batch.seq_lens, 0, out=room).view(-1, 1, 1)
