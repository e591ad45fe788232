"""The buffers of a batch's fields and of a model's inputs, at fixed addresses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

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
    for name, given in inputs.items():
        shape = (*given.leading, config.max_num_tokens, *given.trailing)
        yield Field(
            name=name,
            of_batch=False,
            buffer=torch.zeros(shape, dtype=given.dtype, device=device),
            dim=len(given.leading),
            rows=config.tokens_per_request,
        )


def device_and_dtype(field: Field) -> tuple[str, str]:
    return field.buffer.device.type, str(field.buffer.dtype)


def group_bounds(fields: Sequence[Field]) -> list[tuple[int, int]]:
    """Where the fields of one device and dtype, which are copied together, begin and end."""
    bounds, first = [], 0
    for _, members in groupby(fields, key=device_and_dtype):
        last = first + len(list(members))
        bounds.append((first, last))
        first = last
    return bounds
