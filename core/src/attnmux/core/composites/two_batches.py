"""Two halves of a step at once: while one computes, the other communicates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch

from attnmux.core.choosing.decision import Decision
from attnmux.core.composites.dispatch import DispatchingBackend, Parts, check_context, check_padding
from attnmux.core.composites.factories import Make
from attnmux.core.contract.backend import AttentionBackend
from attnmux.core.contract.batch import ForwardBatch, ForwardMode, MultiItem
from attnmux.core.contract.context import BackendContext
from attnmux.core.contract.spec import SpecInput
from attnmux.core.contract.tree_masks import of_requests
from attnmux.core.facts.errors import InvalidInput


class TboAttnBackend(DispatchingBackend):
    """Attends in whole steps by `primary`, and in each of a step's halves by its own child.

    A layer is called with the prepared batch or with one of its `tbo_children`, which
    `with_halves` makes. A half without requests is skipped: its mode is IDLE, and its call returns
    an empty result.
    """

    def __init__(
        self, primary: AttentionBackend, children: tuple[AttentionBackend, AttentionBackend]
    ) -> None:
        """Raises InvalidInput for children of another context, the primary itself as a child, and
        padding rows of different lengths, since one graph runner pads for all."""
        super().__init__(primary.context, (primary, *children))
        if len({id(each) for each in (primary, *children)}) != 3:
            expected = "two backends besides primary: each has a step of its own in flight"
            raise InvalidInput("children", got="one backend twice", expected=expected)
        check_context("children", primary, *children)
        check_padding("children", primary, *children)
        self.primary = primary
        self.children = children
        self._halves: tuple[ForwardBatch, ...] = ()

    def serving(self, batch: ForwardBatch) -> AttentionBackend:
        """The child of the half that the batch is, else `primary`.

        A copy of a half with other fields is that half too, as long as it has its requests.
        """
        for child, half in zip(self.children, self._halves, strict=False):
            if batch.req_pool_indices is half.req_pool_indices:
                return child
        return self.primary

    def parts(self, batch: ForwardBatch, *, eager: bool) -> Parts:
        self._halves = batch.tbo_children
        halves = zip(self.children, self._halves, strict=False)
        return ((self.primary, batch), *(pair for pair in halves if pair[1].batch_size))

    def select(self, mode: ForwardMode) -> AttentionBackend:
        """The backends of that mode, for halves as this one."""
        first, second = self.children
        primary = self.primary.select(mode)
        if primary is self.primary:
            return self
        return TboAttnBackend(primary, (first.select(mode), second.select(mode)))

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """For whole steps, and for halves of them, of which the second may be the larger."""
        self.primary.init_cuda_graph_state(max_bs, max_num_tokens)
        half = max_bs - max_bs // 2
        for child in self.children:
            child.init_cuda_graph_state(half, max_num_tokens * half // max_bs)


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
    """Of each request."""
    if not batch.forward_mode.is_extend():
        return [1] * batch.batch_size
    (new, _), mirror = batch.extend_lens(), batch.extend_seq_lens_cpu
    found: list[int] = (new if mirror is None else mirror).tolist()
    return found


def make_two_batches(
    inner: Make, decision: Decision, context: BackendContext, phases: Sequence[str]
) -> AttentionBackend:
    """The factory of the part `two_batches`. Raises InvalidInput for a model with linear layers."""
    if context.linear_states is not None:
        expected = "whole steps: no half of a step prepares its linear layers"
        raise InvalidInput("two_batches", got=True, expected=expected)
    primary, first, second = (inner(context, phases) for _ in range(3))
    return TboAttnBackend(primary, (first, second))
