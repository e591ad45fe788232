"""Where the keys of a step's pieces are: page tables and lengths for each of the three queries."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from attnmux.core.batch import ForwardBatch
from attnmux.core.context import BackendContext
from attnmux.core.errors import InvalidInput
from attnmux.core.indices import page_table
from attnmux.core.layer import LayerSpec
from attnmux.nvidia.dual_chunk.pieces import Pieces, longest_keys
from attnmux.nvidia.page_tables import KeyGroup, Keys


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Layers whose keys are in the same places and are met by the same queries."""

    chunk_len: int
    keys: KeyGroup
    """With the page size of the tables: 1, so that they name slots, where a chunk may begin in the
    middle of a page."""

    @classmethod
    def of(cls, layer: LayerSpec, context: BackendContext) -> Group:
        pool = context.token_to_kv_pool
        whole_pages = layer.dual_chunk_len % pool.page_size == 0
        return cls(
            chunk_len=layer.dual_chunk_len,
            keys=KeyGroup(
                is_cross=False,
                page_size=pool.page_size if whole_pages else 1,
                pool_group=pool.group_of(layer.layer_id),
                layer_id=layer.layer_id,
            ),
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Regions:
    """The keys of a step's P pieces."""

    keys: tuple[Keys, ...]
    """Of the first query, the second and the third, as far as the step's sequences have such."""
    query_bounds: torch.Tensor | None
    """As of `Pieces`."""


def in_pool(
    pieces: Pieces,
    group: Group,
    context: BackendContext,
    *,
    longest: int,
    fixed: tuple[Keys, ...],
) -> Regions:
    """The regions of keys that the pool stores, by device operations of static shape.

    longest: keys that a request has at most. fixed: the buffers that a graph replays with, or ().
    """
    widths = longest_keys(group.chunk_len, longest)
    regions = []
    for number, (width, (starts, lens)) in enumerate(zip(widths, pieces.keys(), strict=False)):
        table = page_table(
            context.req_to_token_pool.req_to_token,
            pieces.rows,
            lens,
            page_size=group.keys.page_size,
            kv_start=starts,
            max_len=width,
        )
        table = group.keys.translated(table, context)
        if fixed:
            table = fixed[number].page_table[: len(table)].copy_(table)
            lens = fixed[number].lens[: len(lens)].copy_(lens)
        regions.append(Keys(page_table=table, lens=lens))
    return Regions(keys=tuple(regions), query_bounds=pieces.query_bounds)


def in_call(batch: ForwardBatch, chunk_len: int) -> Regions:
    """The regions of keys that come with an extend's call, one for each of its tokens, as pages of
    one. There is no prefix, whatever the batch says. Raises InvalidInput in decode."""
    if batch.extend_prefix_lens is not None:
        batch = replace(batch, extend_prefix_lens=torch.zeros_like(batch.extend_prefix_lens))
    pieces = Pieces.of(batch, chunk_len)
    bounds = pieces.query_bounds
    if bounds is None:
        raise InvalidInput("save_kv_cache", came=False, expected="True in decode")
    first_rows = bounds[:-1] - pieces.chunks * chunk_len
    regions = []
    widths = longest_keys(chunk_len, batch.num_tokens)
    for width, (starts, lens) in zip(widths, pieces.keys(), strict=False):
        order = torch.arange(width, device=lens.device, dtype=torch.int32)
        table = (first_rows + starts).unsqueeze(1) + order
        table.masked_fill_(order >= lens.unsqueeze(1), 0)
        regions.append(Keys(page_table=table, lens=lens))
    return Regions(keys=tuple(regions), query_bounds=bounds)


def fixed_keys(group: Group, max_batch_size: int, context: BackendContext) -> tuple[Keys, ...]:
    """What graphs of decode steps of up to max_batch_size requests are captured with."""

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=context.device)

    return tuple(
        Keys(
            page_table=zeros(max_batch_size, -(-width // group.keys.page_size)),
            lens=zeros(max_batch_size),
        )
        for width in longest_keys(group.chunk_len, context.max_context_len)
    )
