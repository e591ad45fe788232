"""The adapter: it prepares the library's inputs, calls it, and converts between conventions.

The library's LSE is in base 2 with shape [Hq, T]. Its window counts the query's own key, and 0
means none. Its scales are factors and always given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import cast

import torch

from acme_attnmux.tables import Tables, most_queries
from attnmux.core import (
    AttentionBackend,
    AttentionCall,
    AttnmuxError,
    BackendContext,
    ForwardBatch,
    ForwardMode,
    GraphUnsupported,
    InvalidInput,
)

PagedAttention = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""The library's `paged_attention`, or an emulator of it."""


class AcmePagedBackend(AttentionBackend):
    """MHA and GQA over paged KV."""

    def __init__(
        self, context: BackendContext, options: Mapping[str, object], attend: PagedAttention
    ) -> None:
        super().__init__(context, options)
        self._attend = attend
        self._for_graphs: list[Tables] = []
        self._captured: Tables | None = None
        self._step: Tables | None = None
        self._max_queries = 1

    def init_forward_metadata_out_graph(
        self, batch: ForwardBatch, in_capture: bool = False
    ) -> None:
        """Decide the step's shape on the host."""
        self._step = self._captured = None
        if batch.forward_mode is ForwardMode.IDLE:
            return
        self._max_queries = most_queries(batch)
        if in_capture:
            self._captured = self._buffers(batch.batch_size)

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        """Fill the tables on the device: at replay, from what the batch then holds."""
        if batch.forward_mode is ForwardMode.IDLE:
            return
        tables = self._captured
        if tables is None:
            tables = Tables.make(batch.batch_size, self.context)
        self._step = tables.fill(batch, self._max_queries, self.context)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Earlier buffers stay, since captured graphs read them."""
        if all(tables.max_batch_size < max_bs for tables in self._for_graphs):
            self._for_graphs.append(Tables.make(max_bs, self.context))

    def _buffers(self, batch_size: int) -> Tables:
        for tables in self._for_graphs:
            if batch_size <= tables.max_batch_size:
                return tables
        raise GraphUnsupported(
            f"no buffers for a batch of {batch_size}: call init_cuda_graph_state first"
        )

    def forward_decode(self, call: AttentionCall, batch: ForwardBatch) -> torch.Tensor:
        return self._call(call)

    def forward_extend(self, call: AttentionCall, batch: ForwardBatch) -> torch.Tensor:
        if call.has_own_kv:
            raise InvalidInput(
                "save_kv_cache", got=False, expected="True: the library reads pages alone"
            )
        return self._call(call)

    def _call(self, call: AttentionCall) -> torch.Tensor:
        q, layer, lse = call.q, call.layer, call.lse
        step, pool = self._step, self.context.token_to_kv_pool
        if step is None:
            raise AttnmuxError("no step is prepared: call init_forward_metadata(batch) first")
        if not q.shape[0]:
            return torch.zeros_like(q)
        k_descale, v_descale = pool.read_scales(layer.k_scale, layer.v_scale)
        out, log2_sums = self._attend(
            q,
            _pages(pool.get_key_buffer(layer.layer_id), pool.page_size),
            _pages(pool.get_value_buffer(layer.layer_id), pool.page_size),
            step.block_tables[pool.group_of(layer.layer_id)],
            step.kv_lens,
            step.cu_queries,
            self._max_queries,
            scale=layer.scaling,
            window=layer.sliding_window_size + 1,
            k_descale=k_descale,
            v_descale=v_descale,
            keys_per_step=cast("int", self.options["keys_per_step"]),
        )
        if lse is not None:
            lse.copy_(log2_sums.t()).mul_(math.log(2))
        return out


def _pages(buffer: torch.Tensor, page_size: int) -> torch.Tensor:
    """[slots, Hkv, D] as [pages, page_size, Hkv, D]."""
    return buffer.view(-1, page_size, *buffer.shape[1:])
