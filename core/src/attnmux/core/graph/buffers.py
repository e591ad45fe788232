"""The tensors that captured graphs read: one set at fixed addresses, sliced for each batch size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from operator import attrgetter

import torch

from attnmux.core.contract.arguments import described
from attnmux.core.contract.batch import ForwardBatch
from attnmux.core.contract.mode import ForwardMode
from attnmux.core.contract.spec import SpecInput
from attnmux.core.contract.tree_masks import (
    with_mask,
)
from attnmux.core.facts.errors import InvalidInput
from attnmux.core.graph.config import GraphConfig, ModelInput, check_names
from attnmux.core.graph.fields import (
    VISIBLE,
    MaskBuffers,
    batch_fields,
    device_and_dtype,
    group_bounds,
    input_fields,
)


class FixedBuffers:
    """A batch and the model's inputs at fixed addresses.

    The rows after those of the latest batch are padding: request row 0, slot 0, position 0, the
    backend's fill value for `seq_lens`, no encoder tokens, model inputs of 0.
    """

    def __init__(
        self,
        config: GraphConfig,
        inputs: Mapping[str, ModelInput],
        *,
        seq_len_fill: int,
        max_context_len: int,
        device: torch.device,
    ) -> None:
        self._config = config
        self._fill = seq_len_fill
        max_bs, max_tokens = config.max_batch_size, config.max_num_tokens
        # A tensor made in inference mode could not be written outside of it later
        with torch.inference_mode(False):
            fields = [*batch_fields(config, seq_len_fill, device)]
            fields += input_fields(config, inputs, device)
            # A fused copy takes tensors of one device and dtype
            fields.sort(key=device_and_dtype)
            self._fields = tuple(fields)
            parts = _parts(max_bs, config) if config.custom_mask else ()
            self._masks = tuple(
                MaskBuffers(
                    config,
                    last - first,
                    seq_len_fill=seq_len_fill,
                    max_len=max_context_len,
                    device=device,
                )
                for first, last in parts
            )
            """Buffers of whole steps, then of their halves."""
            # The captured model writes these itself, so `load` does not
            self._topk_indices = None
            if config.index_topk:
                heads = (config.index_heads,) if config.index_heads else ()
                shape = (max_tokens, *heads, config.index_topk)
                self._topk_indices = torch.full(shape, -1, dtype=torch.int32, device=device)
            self._no_slots = torch.zeros(0, dtype=torch.int64, device=device)
            self._new_lens = torch.full(
                (max_bs,), config.tokens_per_request, dtype=torch.int32, device=device
            )
            self._new_lens_cpu = self._new_lens.cpu()
        self._of_batch = attrgetter(*(field.name for field in fields if field.of_batch))
        self._groups = group_bounds(fields)
        self._num_inputs = len(inputs)
        self._targets: dict[int, list[torch.Tensor]] = {}
        self._used = 0

    @property
    def host_tensors(self) -> tuple[torch.Tensor, ...]:
        """The buffers that are host mirrors."""
        mirrors = tuple(f.buffer for f in self._fields if f.name.endswith("_cpu"))
        return (*mirrors, self._new_lens_cpu)

    def views(self, size: int) -> tuple[ForwardBatch, Mapping[str, torch.Tensor]]:
        """The batch and the model's inputs of a padded size."""
        config, num_tokens = self._config, size * self._config.tokens_per_request
        of_batch = {f.name: f.rows_of(0, size) for f in self._fields if f.of_batch}
        inputs = {f.name: f.rows_of(0, size) for f in self._fields if not f.of_batch}
        if config.forward_mode.is_target_verify():
            of_batch["extend_seq_lens"] = self._new_lens[:size]
            of_batch["extend_prefix_lens"] = of_batch["seq_lens"]
            if config.host_lens:
                of_batch["extend_seq_lens_cpu"] = self._new_lens_cpu[:size]
                of_batch["extend_prefix_lens_cpu"] = of_batch["seq_lens_cpu"]
        visible = of_batch.pop(VISIBLE, None)
        if config.encoder:
            of_batch["encoder_out_cache_loc"] = self._no_slots
        if self._topk_indices is not None:
            of_batch["topk_indices"] = self._topk_indices[:num_tokens]
        batch = ForwardBatch(
            forward_mode=config.forward_mode,
            batch_size=size,
            seq_lens_sum=size * self._fill if config.host_lens else None,
            extend_num_tokens=num_tokens if config.forward_mode.is_extend() else None,
            spec_info=self._spec_info(size, visible),
            **of_batch,  # type: ignore[arg-type]  # fields of ForwardBatch by name
        )
        return self._with_halves(batch), inputs

    def load(
        self, batch: ForwardBatch, inputs: Mapping[str, torch.Tensor], padded: ForwardBatch
    ) -> ForwardBatch:
        """Copy a batch and the model's inputs to the buffers; the rows after them become padding.

        padded: the batch of `views` for the size to run. Returns it with this step's values that
        are not tensors. Raises InvalidInput, changing nothing, for tensors whose shapes or dtypes
        differ from the buffers'.
        """
        size = batch.batch_size
        batch = self._with_visible(batch)
        targets = self._targets.get(size)
        if targets is None:
            targets = self._targets[size] = [field.rows_of(0, size) for field in self._fields]
        sources = self._sources(batch, inputs)
        for field, source, target in zip(self._fields, sources, targets, strict=True):
            if source.shape != target.shape or source.dtype != target.dtype:
                raise InvalidInput(field.name, got=described(source), expected=described(target))
        self._load_masks(batch, padded.batch_size)
        # Before the copies: if they are interrupted, the next load makes these rows padding
        self._used = max(self._used, size)
        for first, last in self._groups:
            torch._foreach_copy_(targets[first:last], sources[first:last])
        self._pad_after(size)
        total = batch.seq_lens_sum
        if total is not None:
            total += (padded.batch_size - size) * self._fill
        return self._with_host_values(padded, total, batch.actual_forward_mode)

    def load_padding(self, padded: ForwardBatch) -> ForwardBatch:
        """Make every row padding, for an IDLE step. Returns what `load` returns."""
        self._pad_after(0)
        parts = _parts(padded.batch_size, self._config)
        for masks, (first, last) in zip(self._masks, parts, strict=False):
            masks.load_padding(last - first)
        total = padded.batch_size * self._fill if self._config.host_lens else None
        return self._with_host_values(padded, total, ForwardMode.IDLE)

    def clear(self) -> None:
        """Make every row padding."""
        self._pad_after(0)
        for masks in self._masks:
            masks.clear()

    def _pad_after(self, size: int) -> None:
        """Make the rows after `size` padding. Those after the previous batch already are."""
        if size < self._used:
            for field in self._fields:
                field.rows_of(size, self._used).fill_(field.fill)
        self._used = size

    def _with_host_values(
        self, padded: ForwardBatch, total: int | None, actual_mode: ForwardMode | None
    ) -> ForwardBatch:
        if total != padded.seq_lens_sum or actual_mode is not padded.actual_forward_mode:
            padded = replace(padded, seq_lens_sum=total, actual_forward_mode=actual_mode)
        return self._with_halves(padded)

    def _with_halves(self, batch: ForwardBatch) -> ForwardBatch:
        """With `tbo_children`, if the config asks for them. A half of a single row is empty."""
        if not self._config.two_batches:
            return batch
        tokens, spec = self._config.tokens_per_request, batch.spec_info
        halves = []
        for number, (first, last) in enumerate(_parts(batch.batch_size, self._config)[1:], 1):
            half = batch.slice(first, last, first_token=first * tokens, last_token=last * tokens)
            if self._masks and spec is not None:
                mask, indptr = self._masks[number].views(last - first)
                half = replace(half, spec_info=replace(spec, custom_mask=mask, mask_indptr=indptr))
            elif spec is not None:
                half = replace(half, spec_info=spec.of_requests(first, last))
            halves.append(half)
        return replace(batch, tbo_children=tuple(halves))

    def _load_masks(self, batch: ForwardBatch, padded_size: int) -> None:
        tokens, size = self._config.tokens_per_request, batch.batch_size
        parts = _parts(padded_size, self._config)
        for number, (masks, (first, last)) in enumerate(zip(self._masks, parts, strict=False)):
            start, stop = min(first, size), min(last, size)
            own = {"first_token": start * tokens, "last_token": stop * tokens}
            part = batch.part(start, stop, **own) if number else batch
            masks.load(part, last - first)

    def _sources(
        self, batch: ForwardBatch, inputs: Mapping[str, torch.Tensor]
    ) -> list[torch.Tensor]:
        of_batch = iter(self._of_batch(batch))
        sources = []
        for field in self._fields:
            source = next(of_batch) if field.of_batch else inputs.get(field.name)
            if source is None:
                raise InvalidInput(field.name, got=None, expected="a tensor, as at capture")
            sources.append(source)
        if len(inputs) > self._num_inputs:
            check_names(inputs, [field.name for field in self._fields if not field.of_batch])
        return sources

    def _with_visible(self, batch: ForwardBatch) -> ForwardBatch:
        """With `SpecInput.visible` if the graphs have it. Raises InvalidInput if they have
        not and the batch brings a mask between drafts."""
        form = batch.tree_mask
        if self._config.visible and form != "qlen_only":
            spec = with_mask(batch.drafts(), visible=batch.visible_drafts())
            return replace(batch, spec_info=spec)
        if not self._config.visible and batch.masks_drafts:
            raise InvalidInput(VISIBLE, got="a value", expected="None, as at capture")
        return batch

    def _spec_info(self, size: int, visible: torch.Tensor | None) -> SpecInput | None:
        config = self._config
        if not config.forward_mode.is_target_verify():
            return None
        mask, indptr = self._masks[0].views(size) if self._masks else (None, None)
        return SpecInput(
            draft_token_num=config.tokens_per_request,
            topk=config.spec_topk,
            custom_mask=mask,
            mask_indptr=indptr,
            visible=visible,
        )


def _parts(size: int, config: GraphConfig) -> tuple[tuple[int, int], ...]:
    """The rows of a padded batch and, if it comes as two, those of both halves."""
    halves = (0, size // 2), (size // 2, size)
    return ((0, size), *halves) if config.two_batches else ((0, size),)
