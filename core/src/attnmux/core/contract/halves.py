"""A step cut in two halves, each with some of its requests."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import torch

from attnmux.core.contract.batch import ForwardBatch, MultiItem
from attnmux.core.contract.spec import SpecInput
from attnmux.core.contract.tree_masks import of_requests
from attnmux.core.facts.errors import InvalidInput


def with_halves(batch: ForwardBatch) -> ForwardBatch:
    """The step with its halves as `tbo_children`.

    Steps with as many new tokens for each request (DECODE, TARGET_VERIFY) are cut after B // 2
    requests, others at the request that leaves the new tokens most even. No request is cut, so a
    half may be empty. Lengths without a host mirror are read from the device.
    Raises InvalidInput for new encoder tokens, whose requests no batch names.
    """
    if batch.encoder_out_cache_loc is not None and batch.encoder_out_cache_loc.numel():
        raise InvalidInput(
            "encoder_out_cache_loc",
            got=f"slots of {batch.encoder_out_cache_loc.numel()} encoder tokens",
            expected="none in a step of two batches: run it whole",
        )
    ends = [0, *accumulate(_new_tokens(batch))]
    size, total = batch.batch_size, ends[-1]
    middle = size // 2
    if batch.forward_mode.is_extend() and not batch.forward_mode.is_target_verify():
        middle = min(range(size + 1), key=lambda request: abs(2 * ends[request] - total))
    # Rows after the last request's are padding, and stay with it
    last_token = batch.num_tokens
    cut = ends[middle] if middle < size else last_token
    halves = (half_of(batch, 0, middle, 0, cut), half_of(batch, middle, size, cut, last_token))
    return replace(batch, tbo_children=halves)


def half_of(
    batch: ForwardBatch, first: int, last: int, first_token: int, last_token: int
) -> ForwardBatch:
    """`ForwardBatch.slice` with the requests' own masks and items."""
    half = batch.slice(first, last, first_token=first_token, last_token=last_token)
    spec, items = batch.spec_info, batch.multi_item
    if spec is not None:
        half = replace(half, spec_info=_own_masks(batch, spec, first, last))
    if items is not None:
        own = MultiItem(
            prefix_lens=items.prefix_lens[first:last],
            token_pos_in_items=items.token_pos_in_items[first_token:last_token],
        )
        half = replace(half, multi_item=own)
    return half


def _own_masks(batch: ForwardBatch, spec: SpecInput, first: int, last: int) -> SpecInput:
    if spec.custom_mask is None:
        return of_requests(spec, first, last)
    new = torch.tensor(_new_tokens(batch))
    lens = batch.seq_lens.cpu() if batch.seq_lens_cpu is None else batch.seq_lens_cpu
    keys = lens + new if batch.forward_mode.is_target_verify() else lens
    ends = [0, *accumulate((new * keys).tolist())]
    indptr = spec.mask_indptr
    return replace(
        spec,
        custom_mask=spec.custom_mask[ends[first] : ends[last]],
        mask_indptr=None if indptr is None else indptr[first : last + 1] - indptr[first],
    )


def _new_tokens(batch: ForwardBatch) -> list[int]:
    """New tokens of each request."""
    if not batch.forward_mode.is_extend():
        return [1] * batch.batch_size
    (new, _), mirror = batch.extend_lens(), batch.extend_seq_lens_cpu
    counts: list[int] = (new if mirror is None else mirror).tolist()
    return counts
