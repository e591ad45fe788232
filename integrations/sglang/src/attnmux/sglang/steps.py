"""SGLang's description of a step as a `ForwardBatch`, in tensors at fixed addresses."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode as SglangMode

from attnmux.core import ForwardBatch, ForwardMode, InvalidInput, SpecInput
from attnmux.core.plugin import extend_positions
from attnmux.sglang.items import items_of

MODES = {
    SglangMode.EXTEND: ForwardMode.EXTEND,
    SglangMode.DECODE: ForwardMode.DECODE,
    SglangMode.MIXED: ForwardMode.MIXED,
    SglangMode.IDLE: ForwardMode.IDLE,
    SglangMode.TARGET_VERIFY: ForwardMode.TARGET_VERIFY,
    SglangMode.DRAFT_EXTEND_V2: ForwardMode.DRAFT_EXTEND,
    SglangMode.SPLIT_PREFILL: ForwardMode.EXTEND,
}


class StepBuilder:
    """The batches of one backend.

    SGLang's lengths are int64 and ours int32: they are copied into a buffer, once a step. The
    slots of a padded step are copied too, since SGLang pads its own copy alone.
    """

    def __init__(
        self,
        *,
        max_batch_size: int,
        max_num_tokens: int,
        device: torch.device,
        draft_step: int | None = None,
    ) -> None:
        """draft_step: this backend runs that step of a draft, counted from 0, whose batches have
        the lengths before the draft."""
        self._ahead = 0 if draft_step is None else draft_step + 1
        self._device = device
        self.reserve(max_batch_size, max_num_tokens)

    def reserve(self, max_batch_size: int, max_num_tokens: int) -> None:
        """Make buffers for steps up to this size, before graphs of them are captured. Larger steps
        run eagerly, in tensors of their own."""
        # Tensors made in inference mode could not be written outside of it later
        with torch.inference_mode(False):
            lens = partial(torch.zeros, max_batch_size, dtype=torch.int32, device=self._device)
            tokens = partial(torch.zeros, max_num_tokens, dtype=torch.int64, device=self._device)
            self._lens, self._new_lens, self._prefix_lens = lens(), lens(), lens()
            self._loc, self._positions = tokens(), tokens()

    def step(self, theirs: Any) -> ForwardBatch:  # noqa: ANN401  # a batch, or a view of one
        """The batch of a step. It stays valid until the next one is built.

        Raises InvalidInput for a mode that no backend has.
        """
        mode = MODES.get(theirs.forward_mode)
        if mode is None:
            expected = ", ".join(each.name for each in MODES)
            raise InvalidInput("forward_mode", got=theirs.forward_mode.name, expected=expected)
        size = theirs.batch_size
        lens = _front(self._lens, size)
        torch.add(theirs.seq_lens, self._ahead, out=lens)
        lens_cpu = _on_host(theirs.seq_lens_cpu, size, self._ahead)
        if lens_cpu is None and lens.is_cpu:
            lens_cpu = lens
        if mode.is_decode_or_idle():
            positions = _front(self._positions, size)
            torch.sub(lens, 1, out=positions)
            return ForwardBatch(
                forward_mode=mode,
                batch_size=size,
                req_pool_indices=theirs.req_pool_indices[:size].long(),
                seq_lens=lens,
                seq_lens_cpu=lens_cpu,
                seq_lens_sum=None if lens_cpu is None else int(lens_cpu.sum()),
                out_cache_loc=self._slots(theirs.out_cache_loc, size),
                positions=positions,
            )
        return self._extend(theirs, mode, lens, lens_cpu)

    def _extend(
        self,
        theirs: Any,  # noqa: ANN401  # as above
        mode: ForwardMode,
        lens: torch.Tensor,
        lens_cpu: torch.Tensor | None,
    ) -> ForwardBatch:
        size = theirs.batch_size
        new_lens, prefix_lens = _front(self._new_lens, size), _front(self._prefix_lens, size)
        new_cpu: torch.Tensor | None
        each = _tokens_of_each(theirs, mode)
        if each is not None:
            new_lens.fill_(each)
            new_cpu = torch.full((size,), each, dtype=torch.int32)
        else:
            new_lens.copy_(theirs.extend_seq_lens)
            new_cpu = _on_host(theirs.extend_seq_lens_cpu, size, 0)
        verifies = mode.is_target_verify()
        torch.sub(lens, 0 if verifies else new_lens, out=prefix_lens)
        num_tokens = int(new_cpu.sum()) if new_cpu is not None else int(new_lens.sum())
        positions = _front(self._positions, num_tokens)
        extend_positions(prefix_lens, new_lens, total=num_tokens, out=positions)
        prefix_cpu = lens_cpu
        if not verifies and lens_cpu is not None and new_cpu is not None:
            prefix_cpu = lens_cpu - new_cpu
        return ForwardBatch(
            forward_mode=mode,
            batch_size=size,
            req_pool_indices=theirs.req_pool_indices[:size].long(),
            seq_lens=lens,
            seq_lens_cpu=lens_cpu,
            seq_lens_sum=None if lens_cpu is None else int(lens_cpu.sum()),
            out_cache_loc=self._slots(theirs.out_cache_loc, num_tokens),
            positions=positions,
            extend_seq_lens=new_lens,
            extend_seq_lens_cpu=new_cpu,
            extend_prefix_lens=prefix_lens,
            extend_prefix_lens_cpu=prefix_cpu,
            extend_num_tokens=num_tokens,
            spec_info=spec_input(theirs.spec_info, lens) if verifies else None,
            multi_item=None if verifies else items_of(theirs, new_cpu, prefix_cpu),
        )

    def _slots(self, slots: torch.Tensor | None, num_tokens: int) -> torch.Tensor:
        """[num_tokens] int64: SGLang's if they are that, else in the buffer, padded with 0."""
        if slots is not None and slots.shape[0] >= num_tokens and slots.dtype == torch.int64:
            return slots[:num_tokens]
        ours = _front(self._loc, num_tokens).zero_()
        if slots is not None:
            ours[: slots.shape[0]].copy_(slots[:num_tokens])
        return ours


def _tokens_of_each(theirs: Any, mode: ForwardMode) -> int | None:  # noqa: ANN401
    """New tokens of each request if all have as many; None elsewhere."""
    if mode.is_target_verify():
        return int(theirs.spec_info.draft_token_num)
    if mode.is_draft_extend() and getattr(theirs, "extend_seq_lens", None) is None:
        return int(theirs.positions.shape[0] // theirs.batch_size)
    return None


def spec_input(theirs: Any, prefix_lens: torch.Tensor) -> SpecInput:  # noqa: ANN401  # SGLang's
    """The draft of a verify step. A chain needs no mask.

    prefix_lens: [B] int32. SGLang masks the whole cache or, on a CPU, the draft tokens alone.
    """
    width, topk = int(theirs.draft_token_num), int(theirs.topk)
    mask = theirs.custom_mask
    if topk == 1 or mask is None:
        return SpecInput(draft_token_num=width, topk=max(topk, 1))
    starts = torch.zeros(prefix_lens.shape[0] + 1, dtype=torch.int32, device=prefix_lens.device)
    torch.cumsum(width * (prefix_lens + width), 0, dtype=torch.int32, out=starts[1:])
    if mask.numel() == prefix_lens.shape[0] * width * width:
        mask = _with_prefix(mask.bool(), prefix_lens, width, starts)
    return SpecInput(draft_token_num=width, topk=topk, custom_mask=mask.bool(), mask_indptr=starts)


def _with_prefix(
    mask: torch.Tensor, prefix_lens: torch.Tensor, width: int, starts: torch.Tensor
) -> torch.Tensor:
    """The mask of draft tokens [B * d * d] with the whole prefix visible to each of them."""
    rows = prefix_lens.long().repeat_interleave(width) + width
    ends = rows.cumsum(0)
    whole = torch.ones(int(starts[-1]), dtype=torch.bool, device=mask.device)
    columns = torch.arange(-width, 0, device=mask.device)
    whole[ends.unsqueeze(1) + columns] = mask.view(-1, width)
    return whole


def _on_host(
    values: torch.Tensor | Sequence[int] | None, size: int, ahead: int
) -> torch.Tensor | None:
    """[size] int32 on the host."""
    if values is None:
        return None
    return torch.as_tensor(values, dtype=torch.int32)[:size] + ahead


def _front(buffer: torch.Tensor, length: int) -> torch.Tensor:
    return buffer[:length] if length <= buffer.shape[0] else buffer.new_empty(length)
