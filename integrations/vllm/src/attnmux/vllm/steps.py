"""vLLM's description of a step as a `ForwardBatch`, in tensors at fixed addresses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attnmux.core import ForwardBatch, ForwardMode
from attnmux.core.plugin import extend_positions
from attnmux.vllm.block_table import BlockTable

if TYPE_CHECKING:
    from vllm.v1.attention.backend import CommonAttentionMetadata


class StepBuilder:
    """The batches of one KV cache group.

    vLLM numbers the requests of a step from 0; ours have rows 1, 2, … of the request table, whose
    row 0 is padding's. vLLM's block 0 is reserved as our page 0 is, and its slot -1 is our slot 0.
    """

    def __init__(self, table: BlockTable, *, max_num_tokens: int, seq_len_fill: int) -> None:
        """seq_len_fill: the length of a padding row; see `get_cuda_graph_seq_len_fill_value`."""
        device = table.device
        self._table = table
        self._fill = seq_len_fill
        # Tensors made in inference mode could not be written outside of it later
        with torch.inference_mode(False):
            self._rows = torch.arange(1, table.size + 1, device=device)
            self._lens = torch.zeros(table.size, dtype=torch.int32, device=device)
            self._loc = torch.zeros(max_num_tokens, dtype=torch.int64, device=device)
            self._positions = torch.zeros(max_num_tokens, dtype=torch.int64, device=device)

    def step(
        self, common: CommonAttentionMetadata, num_prompts: int = 0
    ) -> tuple[ForwardBatch, ForwardBatch | None]:
        """The batch of a step, and that of its last num_prompts requests, which have no prefix.
        They stay valid until the next ones are built."""
        size, num_tokens = common.num_reqs, common.num_actual_tokens
        longest = min(common.max_seq_len, self._table.max_context_len)
        self._table.write(common.block_table_tensor[:size], longest)
        torch.clamp(common.slot_mapping[:num_tokens], min=0, out=self._loc[:num_tokens])
        if not num_prompts:
            return self._batch(common, size, num_tokens), None
        first = size - num_prompts
        begin = int(common.query_start_loc_cpu[first])
        return self._batch(common, first, begin), self._prompts(common, first, begin)

    def num_prompts(self, common: CommonAttentionMetadata) -> int:
        """How many requests at the end of a step have several tokens and no prefix."""
        size, lens = common.num_reqs, common.seq_lens_cpu_upper_bound
        if lens is None or common.max_query_len == 1:
            return 0
        starts = common.query_start_loc_cpu[: size + 1]
        new = starts[1:] - starts[:-1]
        # The bound is exact for prompts
        others = ((new < 2) | (new != lens[:size])).nonzero()
        return size - (int(others[-1]) + 1 if len(others) else 0)

    def _prompts(self, common: CommonAttentionMetadata, first: int, begin: int) -> ForwardBatch:
        """The requests from `first` on, whose tokens begin at `begin`."""
        last, end = common.num_reqs, common.num_actual_tokens
        starts_cpu = common.query_start_loc_cpu[first : last + 1]
        starts = common.query_start_loc[first : last + 1]
        new_lens, new_lens_cpu = starts[1:] - starts[:-1], starts_cpu[1:] - starts_cpu[:-1]
        prefix_lens, positions = torch.zeros_like(new_lens), self._positions[begin:end]
        extend_positions(prefix_lens, new_lens, total=end - begin, out=positions)
        return ForwardBatch(
            forward_mode=ForwardMode.MIXED,
            batch_size=last - first,
            req_pool_indices=self._rows[: last - first],
            seq_lens=new_lens,
            seq_lens_cpu=new_lens_cpu,
            out_cache_loc=self._loc[begin:end],
            positions=positions,
            extend_seq_lens=new_lens,
            extend_seq_lens_cpu=new_lens_cpu,
            extend_prefix_lens=prefix_lens,
            extend_prefix_lens_cpu=torch.zeros_like(new_lens_cpu),
            extend_num_tokens=end - begin,
        )

    def _batch(self, common: CommonAttentionMetadata, size: int, num_tokens: int) -> ForwardBatch:
        """The first requests and tokens of a step."""
        loc = self._loc[:num_tokens]
        lens, positions = self._lens[:size], self._positions[:num_tokens]
        is_part = size < common.num_reqs
        is_decode = num_tokens == size and (common.max_query_len == 1 or is_part)
        torch.clamp(common.seq_lens[:size], min=self._fill if is_decode else 0, out=lens)
        on_host = common.seq_lens if lens.is_cpu else None
        if is_decode:
            torch.sub(lens, 1, out=positions)
            return ForwardBatch(
                forward_mode=ForwardMode.DECODE if size else ForwardMode.IDLE,
                batch_size=size,
                req_pool_indices=self._rows[:size],
                seq_lens=lens,
                seq_lens_cpu=None if on_host is None else lens,
                out_cache_loc=loc,
                positions=positions,
            )
        new_lens = common.query_start_loc[1 : size + 1] - common.query_start_loc[:size]
        starts_cpu = common.query_start_loc_cpu[: size + 1]
        prefix_lens = lens - new_lens
        extend_positions(prefix_lens, new_lens, total=num_tokens, out=positions)
        return ForwardBatch(
            forward_mode=ForwardMode.MIXED,
            batch_size=size,
            req_pool_indices=self._rows[:size],
            seq_lens=lens,
            seq_lens_cpu=None if on_host is None else lens,
            out_cache_loc=loc,
            positions=positions,
            extend_seq_lens=new_lens,
            extend_seq_lens_cpu=starts_cpu[1:] - starts_cpu[:-1],
            extend_prefix_lens=prefix_lens,
            extend_prefix_lens_cpu=None if on_host is None else prefix_lens,
            extend_num_tokens=num_tokens,
        )
