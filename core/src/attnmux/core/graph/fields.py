"""The buffers of a batch's fields, of a model's inputs and of whole masks, at fixed addresses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from attnmux.core.contract.arguments import check_vector
from attnmux.core.contract.batch import ForwardBatch
from attnmux.core.facts.errors import InvalidInput
from attnmux.core.graph.config import GraphConfig, ModelInput

VISIBLE = "spec_info.visible"
"""The field of the batch."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Field:
    """A buffer of the batch or of the model's inputs."""

    name: str
    of_batch: bool
    buffer: torch.Tensor
    dim: int = 0
    """The dimension that grows with the batch."""
    rows: int = 1
    """Rows of it for each request."""
    fill: int = 0
    """The value of padding rows."""

    def rows_of(self, first: int, last: int) -> torch.Tensor:
        """The part of requests first to last."""
        return self.buffer.narrow(self.dim, first * self.rows, (last - first) * self.rows)


def batch_fields(config: GraphConfig, lens_fill: int, device: torch.device) -> Iterator[Field]:
    def field(
        name: str, dtype: torch.dtype, rows: int = 1, fill: int = 0, trailing: tuple[int, ...] = ()
    ) -> Field:
        where = torch.device("cpu") if name.endswith("_cpu") else device
        shape = (rows * config.max_batch_size, *trailing)
        buffer = torch.full(shape, fill, dtype=dtype, device=where)
        return Field(name=name, of_batch=True, buffer=buffer, rows=rows, fill=fill)

    tokens = config.tokens_per_request
    yield field("req_pool_indices", torch.int64)
    yield field("seq_lens", torch.int32, fill=lens_fill)
    yield field("out_cache_loc", torch.int64, rows=tokens)
    yield field("positions", torch.int64, rows=tokens)
    if config.encoder:
        yield field("encoder_lens", torch.int32)
    if config.visible:
        yield field(VISIBLE, torch.bool, fill=True, trailing=(tokens, tokens))
    if config.host_lens:
        yield field("seq_lens_cpu", torch.int32, fill=lens_fill)


def input_fields(
    config: GraphConfig, inputs: Mapping[str, ModelInput], device: torch.device
) -> Iterator[Field]:
    for name, tensor in inputs.items():
        shape = (*tensor.leading, config.max_num_tokens, *tensor.trailing)
        yield Field(
            name=name,
            of_batch=False,
            buffer=torch.zeros(shape, dtype=tensor.dtype, device=device),
            dim=len(tensor.leading),
            rows=config.tokens_per_request,
        )


def device_and_dtype(field: Field) -> tuple[str, str]:
    return field.buffer.device.type, str(field.buffer.dtype)


def group_bounds(fields: Sequence[Field]) -> list[tuple[int, int]]:
    """Begin and end of the fields of one device and dtype, which are copied together."""
    bounds, first = [], 0
    for _, members in groupby(fields, key=device_and_dtype):
        last = first + len(list(members))
        bounds.append((first, last))
        first = last
    return bounds


class MaskBuffers:
    """A flat mask of the largest size, and the start of each request's part.

    A graph sees room for `size` requests of the longest context and does not read the values after
    the last request's part. Padding rows see all of their keys.
    """

    def __init__(
        self,
        config: GraphConfig,
        max_bs: int,
        *,
        seq_len_fill: int,
        max_len: int,
        device: torch.device,
    ) -> None:
        draft = config.tokens_per_request
        self._padding_width = draft * (seq_len_fill + draft)
        self._width = max(draft * max_len, self._padding_width)
        self._mask = torch.ones(max_bs * self._width, dtype=torch.bool, device=device)
        self._indptr = torch.arange(max_bs + 1, device=device).int() * self._padding_width
        self._padding_ends = self._indptr[1:].clone()

    def views(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Mask and indptr of a padded size."""
        return self._mask[: size * self._width], self._indptr[: size + 1]

    def load(self, batch: ForwardBatch, size: int) -> None:
        """Copy the batch's mask; the requests after it, up to `size`, become padding.

        Raises InvalidInput, changing nothing, for a mask that is missing or too large.
        """
        spec, real = batch.spec_info, batch.batch_size
        if spec is None or spec.custom_mask is None or spec.mask_indptr is None:
            expected = "a mask and its mask_indptr"
            raise InvalidInput("spec_info.custom_mask", got=None, expected=expected)
        total, room = spec.custom_mask.numel(), real * self._width
        if total > room or spec.custom_mask.dtype != torch.bool:
            raise InvalidInput(
                "spec_info.custom_mask",
                got=f"{total} values of {spec.custom_mask.dtype}",
                expected=f"at most {room} of torch.bool, for {real} requests of full context",
            )
        check_vector("spec_info.mask_indptr", spec.mask_indptr, torch.int32, real + 1)
        self._mask[:total].copy_(spec.custom_mask)
        self._indptr[: real + 1].copy_(spec.mask_indptr)
        self._pad(real, total, size)

    def load_padding(self, size: int) -> None:
        """Make all of `size` requests padding."""
        self._indptr[0].zero_()
        self._pad(0, 0, size)

    def _pad(self, real: int, total: int, size: int) -> None:
        """Make the requests real to size padding, after `total` values of the mask."""
        padding = size - real
        if padding:
            self._mask[total : total + padding * self._padding_width].fill_(True)
            torch.add(self._padding_ends[:padding], total, out=self._indptr[real + 1 : size + 1])

    def clear(self) -> None:
        """Make every request padding."""
        self._mask.fill_(True)
        self._indptr[0].zero_()
        self._indptr[1:].copy_(self._padding_ends)
