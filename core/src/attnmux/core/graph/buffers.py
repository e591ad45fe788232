"""The tensors that captured graphs read: one set at fixed addresses, sliced for each batch size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter

import torch

from attnmux.core.batch import ForwardBatch
from attnmux.core.errors import InvalidInput
from attnmux.core.graph.config import GraphConfig, ModelInput, check_names
from attnmux.core.graph.masks import MaskBuffers
from attnmux.core.spec import SpecInput


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Field:
    """A buffer of the batch or of the model's inputs."""

    name: str
    of_batch: bool
    buffer: torch.Tensor
    dim: int
    """The dimension that grows with the batch."""
    rows: int
    """Along it, for each request."""
    fill: int
    """What padding rows hold."""

    def rows_of(self, first: int, last: int) -> torch.Tensor:
        """The part of requests first to last."""
        return self.buffer.narrow(self.dim, first * self.rows, (last - first) * self.rows)


class FixedBuffers:
    """A batch and the model's inputs at fixed addresses.

    Behind the rows of the latest batch lie padding rows: request row 0, slot 0, position 0, the
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
        self._device = device
        # A tensor made in inference mode could not be written outside of it later.
        with torch.inference_mode(False):
            fields = [*self._batch_fields(), *self._input_fields(inputs)]
            # One copy for each device and dtype: a fused kernel takes tensors of one dtype.
            fields.sort(key=_group)
            self._fields = tuple(fields)
            self._masks = None
            if config.custom_mask:
                self._masks = MaskBuffers(
                    config, seq_len_fill=seq_len_fill, max_len=max_context_len, device=device
                )
            # What an indexer writes in the graph itself is nothing to load.
            self._topk_indices = None
            if config.index_topk:
                self._topk_indices = torch.full(
                    (config.max_num_tokens, config.index_topk),
                    -1,
                    dtype=torch.int32,
                    device=device,
                )
            self._no_slots = torch.zeros(0, dtype=torch.int64, device=device)
            self._new_lens = torch.full(
                (config.max_batch_size,),
                config.tokens_per_request,
                dtype=torch.int32,
                device=device,
            )
            self._new_lens_cpu = self._new_lens.cpu()
        self._of_batch = attrgetter(*(field.name for field in fields if field.of_batch))
        self._groups = _bounds(fields)
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
        config = self._config
        of_batch = {f.name: f.rows_of(0, size) for f in self._fields if f.of_batch}
        inputs = {f.name: f.rows_of(0, size) for f in self._fields if not f.of_batch}
        if config.forward_mode.is_target_verify():
            of_batch["extend_seq_lens"] = self._new_lens[:size]
            of_batch["extend_prefix_lens"] = of_batch["seq_lens"]
            if config.host_lens:
                of_batch["extend_seq_lens_cpu"] = self._new_lens_cpu[:size]
                of_batch["extend_prefix_lens_cpu"] = of_batch["seq_lens_cpu"]
        if config.encoder:
            of_batch["encoder_out_cache_loc"] = self._no_slots
        picks = self._topk_indices
        batch = ForwardBatch(
            forward_mode=config.forward_mode,
            batch_size=size,
            seq_lens_sum=size * self._fill if config.host_lens else None,
            extend_num_tokens=size * config.tokens_per_request
            if config.forward_mode.is_extend()
            else None,
            topk_indices=None if picks is None else picks[: size * config.tokens_per_request],
            spec_info=self._spec_info(size),
            **of_batch,  # type: ignore[arg-type]  # fields of ForwardBatch by name
        )
        if config.two_batches:
            batch = replace(batch, tbo_children=_halves(batch, config.tokens_per_request))
        return batch, inputs

    def load(
        self, batch: ForwardBatch, inputs: Mapping[str, torch.Tensor], padded: ForwardBatch
    ) -> ForwardBatch:
        """Copy a batch and the model's inputs to the buffers; rows behind them become padding.

        padded: the batch of `views` for the size to run. Returns it with the values of this step
        that are no tensors. Raises InvalidInput, changing nothing, for tensors of other shapes or
        dtypes than those of the buffers.
        """
        size = batch.batch_size
        targets = self._targets.get(size)
        if targets is None:
            targets = self._targets[size] = [field.rows_of(0, size) for field in self._fields]
        sources = self._sources(batch, inputs)
        for field, source, target in zip(self._fields, sources, targets, strict=True):
            if source.shape != target.shape or source.dtype != target.dtype:
                raise InvalidInput(
                    field.name,
                    came=f"{source.dtype} of shape {tuple(source.shape)}",
                    expected=f"{target.dtype} of shape {tuple(target.shape)}",
                )
        if self._masks is not None:
            self._masks.load(batch, padded.batch_size)
        # Before the copies: should one be interrupted, the next load makes these rows padding.
        self._used = max(self._used, size)
        for first, last in self._groups:
            torch._foreach_copy_(targets[first:last], sources[first:last])
        self._pad_behind(size)
        return self._with_host_values(batch, padded)

    def clear(self) -> None:
        """Make every row padding."""
        self._pad_behind(0)
        if self._masks is not None:
            self._masks.clear()

    def _pad_behind(self, size: int) -> None:
        """Rows behind `size` become padding. Those behind the previous batch are."""
        if size < self._used:
            for field in self._fields:
                field.rows_of(size, self._used).fill_(field.fill)
        self._used = size

    def _with_host_values(self, batch: ForwardBatch, padded: ForwardBatch) -> ForwardBatch:
        total, actual_mode = batch.seq_lens_sum, batch.actual_forward_mode
        if total is not None:
            total += (padded.batch_size - batch.batch_size) * self._fill
        if total != padded.seq_lens_sum or actual_mode is not padded.actual_forward_mode:
            padded = replace(padded, seq_lens_sum=total, actual_forward_mode=actual_mode)
        if padded.tbo_children:
            children = _halves(padded, self._config.tokens_per_request)
            padded = replace(padded, tbo_children=children)
        return padded

    def _sources(
        self, batch: ForwardBatch, inputs: Mapping[str, torch.Tensor]
    ) -> list[torch.Tensor]:
        of_batch = iter(self._of_batch(batch))
        sources = []
        for field in self._fields:
            source = next(of_batch) if field.of_batch else inputs.get(field.name)
            if source is None:
                raise InvalidInput(field.name, came=None, expected="a tensor, as at capture")
            sources.append(source)
        if len(inputs) > self._num_inputs:
            check_names(inputs, [field.name for field in self._fields if not field.of_batch])
        return sources

    def _spec_info(self, size: int) -> SpecInput | None:
        config = self._config
        if not config.forward_mode.is_target_verify():
            return None
        mask, indptr = (None, None) if self._masks is None else self._masks.views(size)
        return SpecInput(
            draft_token_num=config.tokens_per_request,
            topk=config.spec_topk,
            custom_mask=mask,
            mask_indptr=indptr,
        )

    def _batch_fields(self) -> list[_Field]:
        config = self._config
        tokens = config.tokens_per_request
        made = [
            self._field("req_pool_indices", torch.int64),
            self._field("seq_lens", torch.int32, fill=self._fill),
            self._field("out_cache_loc", torch.int64, rows=tokens),
            self._field("positions", torch.int64, rows=tokens),
        ]
        if config.encoder:
            made.append(self._field("encoder_lens", torch.int32))
        if config.host_lens:
            made.append(self._field("seq_lens_cpu", torch.int32, fill=self._fill, on_host=True))
        return made

    def _field(
        self,
        name: str,
        dtype: torch.dtype,
        *,
        rows: int = 1,
        fill: int = 0,
        on_host: bool = False,
    ) -> _Field:
        device = torch.device("cpu") if on_host else self._device
        buffer = torch.full((rows * self._config.max_batch_size,), fill, dtype=dtype, device=device)
        return _Field(name=name, of_batch=True, buffer=buffer, dim=0, rows=rows, fill=fill)

    def _input_fields(self, inputs: Mapping[str, ModelInput]) -> list[_Field]:
        num_tokens = self._config.max_num_tokens
        return [
            _Field(
                name=name,
                of_batch=False,
                buffer=torch.zeros(
                    (*given.leading, num_tokens, *given.trailing),
                    dtype=given.dtype,
                    device=self._device,
                ),
                dim=len(given.leading),
                rows=self._config.tokens_per_request,
                fill=0,
            )
            for name, given in inputs.items()
        ]


def _group(field: _Field) -> tuple[str, str]:
    """Fields of one group are copied together."""
    return field.buffer.device.type, str(field.buffer.dtype)


def _bounds(fields: list[_Field]) -> list[tuple[int, int]]:
    """Where the fields that are copied together begin and end."""
    bounds, first = [], 0
    for _, members in groupby(fields, key=_group):
        last = first + len(list(members))
        bounds.append((first, last))
        first = last
    return bounds


def _halves(batch: ForwardBatch, tokens_per_request: int) -> tuple[ForwardBatch, ForwardBatch]:
    """The first half of the rows and the others. A half of a single row is empty."""

    def part(first: int, last: int) -> ForwardBatch:
        return batch.slice(
            first,
            last,
            first_token=first * tokens_per_request,
            last_token=last * tokens_per_request,
        )

    middle = batch.batch_size // 2
    return part(0, middle), part(middle, batch.batch_size)
