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

    def step(self, common: CommonAttentionMetadata) -> ForwardBatch:
        """The batch of a step. It stays valid until the next one is built."""
        self._take(common)
        whole = slice(0, common.num_reqs), slice(0, common.num_actual_tokens)
        is_decode = common.max_query_len == 1 and common.num_actual_tokens == common.num_reqs
        return self._decodes(common, *whole) if is_decode else self._extends(common, *whole)

    def in_two_parts(
        self, common: CommonAttentionMetadata, num_prompts: int
    ) -> tuple[ForwardBatch, ForwardBatch]:
        """The batches of a step's other requests and of its last num_prompts ones, as `step`."""
        self._take(common)
        first = common.num_reqs - num_prompts
        begin = int(common.query_start_loc_cpu[first])
        others = slice(0, first), slice(0, begin)
        prompts = slice(first, common.num_reqs), slice(begin, common.num_actual_tokens)
        return (
            self._decodes(common, *others) if begin == first else self._extends(common, *others),
            self._extends(common, *prompts, common.seq_lens_cpu_upper_bound),
        )

    def _take(self, common: CommonAttentionMetadata) -> None:
        """Copy the step's pages and slots."""
        longest = min(common.max_seq_len, self._table.max_context_len)
        self._table.write(common.block_table_tensor[: common.num_reqs], longest)
        num_tokens = common.num_actual_tokens
        torch.clamp(common.slot_mapping[:num_tokens], min=0, out=self._loc[:num_tokens])

    @staticmethod
    def num_prompts(common: CommonAttentionMetadata) -> int:
        """How many requests at the end of a step are prompts whose lengths the host knows."""
        is_prompt: torch.Tensor | None = common.is_prefilling
        size: int = common.num_reqs
        if is_prompt is None or common.seq_lens_cpu_upper_bound is None:
            return 0
        if common.max_query_len == 1 or not is_prompt.is_cpu:
            return 0
        others = (~is_prompt[:size]).nonzero()
        return size - (int(others[-1]) + 1 if len(others) else 0)

    def _decodes(
        self, common: CommonAttentionMetadata, requests: slice, tokens: slice
    ) -> ForwardBatch:
        """Requests of a step that have one token each; IDLE without any."""
        lens, positions = self._lens[requests], self._positions[tokens]
        torch.clamp(common.seq_lens[requests], min=self._fill, out=lens)
        torch.sub(lens, 1, out=positions)
        return ForwardBatch(
            forward_mode=ForwardMode.DECODE if len(lens) else ForwardMode.IDLE,
            batch_size=len(lens),
            req_pool_indices=self._rows[requests],
            seq_lens=lens,
            seq_lens_cpu=lens if lens.is_cpu else None,
            out_cache_loc=self._loc[tokens],
            positions=positions,
        )

    def _extends(
        self,
        common: CommonAttentionMetadata,
        requests: slice,
        tokens: slice,
        on_host: torch.Tensor | None = None,
    ) -> ForwardBatch:
        """Requests of a step, and their tokens. on_host: the lengths of all requests."""
        lens, positions = self._lens[requests], self._positions[tokens]
        torch.clamp(common.seq_lens[requests], min=0, out=lens)
        lens_cpu = lens if lens.is_cpu else None if on_host is None else on_host[requests]
        starts = common.query_start_loc[requests.start : requests.stop + 1]
        starts_cpu = common.query_start_loc_cpu[requests.start : requests.stop + 1]
        new_lens, new_lens_cpu = starts[1:] - starts[:-1], starts_cpu[1:] - starts_cpu[:-1]
        prefix_lens, num_tokens = lens - new_lens, len(positions)
        extend_positions(prefix_lens, new_lens, total=num_tokens, out=positions)
        return ForwardBatch(
            forward_mode=ForwardMode.MIXED,
            batch_size=len(lens),
            req_pool_indices=self._rows[requests],
            seq_lens=lens,
            seq_lens_cpu=lens_cpu,
            out_cache_loc=self._loc[tokens],
            positions=positions,
            extend_seq_lens=new_lens,
            extend_seq_lens_cpu=new_lens_cpu,
            extend_prefix_lens=prefix_lens,
            extend_prefix_lens_cpu=None if lens_cpu is None else lens_cpu - new_lens_cpu,
            extend_num_tokens=num_tokens,
        )
