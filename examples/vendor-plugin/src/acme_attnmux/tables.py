"""Tables of a step's keys and queries, in the library's layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from attnmux.core import BackendContext, ForwardBatch, InvalidInput
from attnmux.core.plugin import cu_seqlens, page_table


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Tables:
    """Memory for a step of up to `max_batch_size` requests: graphs keep its addresses."""

    block_tables: Mapping[int, torch.Tensor]
    """[max_batch_size, width] int32, by `KVPool.group_of`: one for all layers of a group."""
    kv_lens: torch.Tensor
    """[max_batch_size] int32"""
    cu_queries: torch.Tensor
    """[max_batch_size + 1] int32"""

    @property
    def max_batch_size(self) -> int:
        return self.kv_lens.shape[0]

    @classmethod
    def make(cls, max_batch_size: int, context: BackendContext) -> Tables:
        pool = context.token_to_kv_pool
        width = -(-context.max_context_len // pool.page_size)

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=context.device)

        return cls(
            block_tables={
                pool.group_of(layer.layer_id): zeros(max_batch_size, width)
                for layer in context.layers
            },
            kv_lens=zeros(max_batch_size),
            cu_queries=zeros(max_batch_size + 1),
        )

    def fill(self, batch: ForwardBatch, max_queries: int, context: BackendContext) -> Tables:
        """Write the step, by device operations of static shape. Returns its part of the memory.

        The table is as wide as the longest context, since the library stops at `kv_lens`: then no
        length has to come from the device.
        """
        size, pool = batch.batch_size, context.token_to_kv_pool
        part = Tables(
            block_tables={group: table[:size] for group, table in self.block_tables.items()},
            kv_lens=self.kv_lens[:size],
            cu_queries=self.cu_queries[: size + 1],
        )
        part.kv_lens.copy_(batch.seq_lens)
        if batch.forward_mode.is_target_verify():
            part.kv_lens.add_(max_queries)  # there, seq_lens is the prefix alone
        if batch.forward_mode.is_decode() or batch.forward_mode.is_target_verify():
            ends = torch.arange(0, size * max_queries + 1, max_queries, device=context.device)
            part.cu_queries.copy_(ends)
        elif batch.extend_seq_lens is not None:
            cu_seqlens(batch.extend_seq_lens, out=part.cu_queries)
        pages = page_table(
            context.req_to_token_pool.req_to_token,
            batch.req_pool_indices,
            part.kv_lens,
            page_size=pool.page_size,
            max_len=context.max_context_len,
        )
        layer_of_group = {pool.group_of(layer.layer_id): layer.layer_id for layer in context.layers}
        for group, table in part.block_tables.items():
            table.copy_(pool.translate_pages(pages, layer_of_group[group]))
        return part


def most_queries(batch: ForwardBatch) -> int:
    """New tokens of the request that has the most: host work, which may synchronise.

    Raises InvalidInput for what the library does not serve, and for missing lengths.
    """
    spec, lens = batch.spec_info, batch.extend_seq_lens
    if batch.tree_mask is not None:
        raise InvalidInput("custom_mask", got="a mask", expected="None: drafts are chains")
    if batch.multi_item is not None:
        raise InvalidInput("multi_item", got="many items", expected="None")
    if batch.forward_mode.is_decode():
        return 1
    if batch.forward_mode.is_target_verify():
        if spec is None:
            raise InvalidInput("spec_info", got=None, expected="a SpecInput in TARGET_VERIFY")
        return spec.draft_token_num
    if lens is None:
        raise InvalidInput("extend_seq_lens", got=None, expected="lengths in an extend step")
    if batch.extend_seq_lens_cpu is not None:
        lens = batch.extend_seq_lens_cpu
    return max(int(lens.max()), 1) if lens.numel() else 1
