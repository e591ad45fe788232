"""Gives a backend the masks of draft trees in a form that its card names."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from attnmux.core.composites.dispatch import DispatchingBackend, MemberSteps
from attnmux.core.contract.arguments import check_fields
from attnmux.core.contract.backend import AttentionBackend
from attnmux.core.contract.batch import ForwardBatch
from attnmux.core.contract.spec import FORMS
from attnmux.core.contract.tree_masks import check_trees, with_form, with_mask
from attnmux.core.facts.values import TreeMask


def with_mask_forms(backend: AttentionBackend, forms: tuple[TreeMask, ...]) -> AttentionBackend:
    """The backend, or one around it if steps may have masks in a form that it does not read.

    forms: as `BackendCard.tree_masks`.
    """
    request = backend.context.request
    if not (request.has_trees or request.custom_mask) or {*FORMS.values()} <= {*forms}:
        return backend
    return MaskFormsBackend(backend, forms)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Buffers:
    """Buffers that graphs read. Steps take the first one with room, at capture and at every
    replay."""

    values: torch.Tensor
    """Flat, in the form that the backend reads."""
    bounds: torch.Tensor
    """[B + 1] int32: `SpecInput.mask_indptr`."""

    def fits(self, size: int, count: int) -> bool:
        """Whether `count` values of `size` requests fit."""
        return size < len(self.bounds) and count <= len(self.values)


class MaskFormsBackend(DispatchingBackend):
    """Converts the mask of a verify step, on the device, before `child` prepares the step.

    For graphs it converts to buffers of its own: kilobytes, except for whole masks, which have room
    for the longest contexts.
    """

    def __init__(self, child: AttentionBackend, forms: tuple[TreeMask, ...]) -> None:
        """forms: what `child` reads, as `BackendCard.tree_masks`."""
        super().__init__(child.context, (child,))
        self.child = child
        self.forms = forms
        self._buffers: list[_Buffers] = []

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self.child.init_cuda_graph_state(max_bs, max_num_tokens)
        device, drafts = self.context.device, max_num_tokens // max_bs
        width, dtype = drafts * drafts, torch.bool
        if self.forms[0] == "full":
            width = drafts * (self.context.max_context_len + drafts)
        elif self.forms[0] == "qlen_only_bitpacking":
            width, dtype = drafts * -(-drafts // 8), torch.uint8
        # A decode step has no drafts
        if drafts > 1 and not any(buffer.fits(max_bs, max_bs * width) for buffer in self._buffers):
            values = torch.zeros(max_bs * width, dtype=dtype, device=device)
            bounds = torch.zeros(max_bs + 1, dtype=torch.int32, device=device)
            self._buffers.append(_Buffers(values=values, bounds=bounds))

    def parts(self, batch: ForwardBatch, *, eager: bool) -> MemberSteps:
        if not self._is_foreign(batch):
            return ((self.child, batch),)
        exact = batch
        if eager:
            check_fields(batch)
        if eager and self.context.debug:
            check_trees(batch)
            # The child's checks count a whole mask's values
            exact = replace(batch, seq_lens_sum=int(batch.seq_lens.sum()))
        longest = self.context.max_context_len
        converted = with_form(exact, self.forms[0], max_context_len=longest)
        return ((self.child, converted if eager else self._in_buffers(converted)),)

    def _is_foreign(self, batch: ForwardBatch) -> bool:
        form = batch.tree_mask
        return form is not None and form not in self.forms and batch.forward_mode.is_target_verify()

    def as_served(self, batch: ForwardBatch) -> ForwardBatch:
        return self.step_of(self.child) if self._is_foreign(batch) else batch

    def _in_buffers(self, batch: ForwardBatch) -> ForwardBatch:
        """The step with its mask where graphs read it, if it fits there."""
        spec, size = batch.drafts(), batch.batch_size
        form, name = spec.tree_mask, spec.mask_field
        assert name is not None
        values: torch.Tensor = getattr(spec, name)
        width = spec.draft_token_num * (self.context.max_context_len + spec.draft_token_num)
        count = size * width if form == "full" else values.numel()
        buffers = next((buffer for buffer in self._buffers if buffer.fits(size, count)), None)
        if buffers is None:
            return batch
        fixed = buffers.values[:count]
        fixed[: values.numel()].copy_(values.view(-1))
        if form != "full":
            return replace(batch, spec_info=with_mask(spec, **{name: fixed.view_as(values)}))
        assert spec.mask_indptr is not None
        bounds = buffers.bounds[: size + 1].copy_(spec.mask_indptr)
        return replace(batch, spec_info=with_mask(spec, custom_mask=fixed, mask_indptr=bounds))
