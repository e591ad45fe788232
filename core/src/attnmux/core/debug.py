"""Checks of a batch's values. They synchronise with the device, so only `debug` runs them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attnmux.core.errors import InvalidInput

if TYPE_CHECKING:
    from attnmux.core.backend import BackendContext
    from attnmux.core.batch import ForwardBatch


def check_batch(context: BackendContext, batch: ForwardBatch) -> None:
    """Refuse a batch whose indices or lengths point outside the pools.

    Raises InvalidInput naming the field, the offending range and what was expected.
    """
    table = context.req_to_token_pool.req_to_token
    slots = context.token_to_kv_pool.size + context.token_to_kv_pool.page_size
    _within("req_pool_indices", batch.req_pool_indices, table.shape[0])
    _within("out_cache_loc", batch.out_cache_loc, slots)
    _within("req_to_token", table[batch.req_pool_indices], slots)
    lens = batch.seq_lens
    if batch.encoder_lens is not None:
        _within("encoder_lens", batch.encoder_lens, context.max_context_len + 1)
        lens = lens + batch.encoder_lens
    if batch.forward_mode.is_target_verify() and batch.extend_seq_lens is not None:
        lens = lens + batch.extend_seq_lens
    _within("seq_lens", lens, context.max_context_len + 1)
    if batch.forward_mode.is_extend():
        _check_extend(batch)


def _check_extend(batch: ForwardBatch) -> None:
    if batch.extend_seq_lens is None or batch.extend_prefix_lens is None:
        raise InvalidInput(
            "extend_seq_lens", came=None, expected="new and cached lengths in an extend step"
        )
    total = int(batch.extend_seq_lens.sum())
    if total > batch.num_tokens:
        raise InvalidInput(
            "extend_seq_lens", came=f"{total} tokens", expected=f"at most {batch.num_tokens}"
        )
    ends = batch.extend_prefix_lens
    if not batch.forward_mode.is_target_verify():
        ends = ends + batch.extend_seq_lens
    if not torch.equal(ends, batch.seq_lens):
        raise InvalidInput(
            "seq_lens", came=batch.seq_lens.tolist(), expected=f"prefix + new = {ends.tolist()}"
        )


def _within(field: str, values: torch.Tensor, bound: int) -> None:
    if values.numel() and (int(values.min()) < 0 or int(values.max()) >= bound):
        raise InvalidInput(
            field,
            came=f"values from {int(values.min())} to {int(values.max())}",
            expected=f"0 to {bound - 1}",
        )
