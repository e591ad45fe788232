"""Steps with any number of queries a request.

fmha_v2 wants K and V of a page side by side in one tensor: its paged layout is
`[pages, 2, page, Hkv, D]`, and an entry p of a block table leads to K in its block 2p and to V in
its block 2p + 1 (paged_kv_cache.h). The pool's K and V lie apart, so each layer copies the step's
pages to a tensor of that layout, which all layers share. The ragged layouts do not help: on SM90
they read zeros for keys beyond the number of queries (dma.h, `total_seqlen`).
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

import torch

from attnmux.core import GraphUnsupported, InvalidInput
from attnmux.core.plugin import KeyGroup, PageTables, Rows, cu_seqlens, kv_indices, kv_indptr
from attnmux.nvidia.trtllm import queries_like
from attnmux.nvidia.trtllm_mha.layers import Half, TRTLLMMHAKernels, TRTLLMMHALayer

if TYPE_CHECKING:
    from attnmux.core import BackendContext, ForwardBatch
    from attnmux.core.plugin import DecodeBuffers

_TILE_COUNTER_BYTES = 1 << 20
"""One counter of tiles, cleared before a launch and left at what it came to (fmha_v2_run.cu)."""


class Prefill(Half):
    """Rows of no request become 0."""

    _tables: PageTables
    _is_whole: bool
    """Whether every row is a request's, as far as the host knows."""

    def plan(self, batch: ForwardBatch, buffers: DecodeBuffers | None) -> None:
        if buffers is not None:
            raise GraphUnsupported(
                f"{batch.forward_mode.name} runs without a graph: only steps with the same number "
                "of tokens for each request are captured"
            )
        self._tables = PageTables.of(batch, self._context, {})
        lens = batch.extend_seq_lens_cpu
        self._is_whole = lens is not None and int(lens.sum()) == batch.num_tokens

    def attend(self, q: torch.Tensor, layer: TRTLLMMHALayer, out: torch.Tensor) -> None:
        if not self._is_whole:
            out.zero_()
        self._launch(q, layer, out)

    @abstractmethod
    def _launch(self, q: torch.Tensor, layer: TRTLLMMHALayer, out: torch.Tensor) -> None:
        """Write the requests' rows of `out`."""


class GeneratedPrefill(Prefill):
    """trtllm-gen: causal from the end of the keys, with Q in the dtype of K and V."""

    _kv_bounds: torch.Tensor

    def fill(self, batch: ForwardBatch) -> None:
        self._tables.fill(batch, self._groups, self._context)
        self._kv_bounds = cu_seqlens(batch.seq_lens)

    def _launch(self, q: torch.Tensor, layer: TRTLLMMHALayer, out: torch.Tensor) -> None:
        tables = self._tables
        keys = tables.keys[layer.group]
        self._kernels.trtllm_batch_context_with_kv_cache(
            Rows.aligned(queries_like(q, layer.kv[0])),
            layer.kv,
            self._workspace,
            keys.page_table,
            keys.lens,
            tables.max_seqlen_q,
            tables.max_seqlen_k,
            batch_size=tables.batch_size,
            cum_seq_lens_q=tables.query_bounds(q.device),
            cum_seq_lens_kv=self._kv_bounds,
            out=out,
            **layer.arguments,
        )


class StagedPrefill(Prefill):
    """fmha_v2, which takes addresses and no strides.

    There are no kernels for 8-bit floats; those for float16 add up in float16, logits and values
    both (fmha_v2_run.cu, `acc_type`): the sum of a few hundred values is infinite, or off by more
    than float16's own rounding.
    """

    _kv_lens: torch.Tensor
    _kv_bounds: torch.Tensor
    _block_table: torch.Tensor
    _pages: dict[KeyGroup, torch.Tensor]
    _staged: dict[torch.Size, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    """By a page's shape: [pages of the step, 2, page, Hkv, D], and its halves for K and V."""

    def __init__(
        self,
        kernels: TRTLLMMHAKernels,
        context: BackendContext,
        layers: tuple[TRTLLMMHALayer, ...],
        workspace: torch.Tensor,
    ) -> None:
        # fmha_v2 leaves its count where the decode kernels want zeros.
        counter = context.workspace.get("trtllm fmha_v2", _TILE_COUNTER_BYTES)
        super().__init__(kernels, context, layers, counter)

    def plan(self, batch: ForwardBatch, buffers: DecodeBuffers | None) -> None:
        dtype = self._context.token_to_kv_pool.dtype
        if dtype != torch.bfloat16:
            raise InvalidInput(
                "token_to_kv_pool",
                got=dtype,
                expected=f"{torch.bfloat16} for prefill: only there fmha_v2 adds up in float32",
            )
        super().plan(batch, buffers)

    def fill(self, batch: ForwardBatch) -> None:
        """The step's pages, request by request, and where each request's begin."""
        tables, context = self._tables, self._context
        page_size = context.token_to_kv_pool.page_size
        if batch.extend_seq_lens is not None:
            tables.bounds["queries"] = cu_seqlens(batch.extend_seq_lens)
        self._kv_lens, self._kv_bounds = batch.seq_lens, cu_seqlens(batch.seq_lens)
        indptr = kv_indptr(batch.seq_lens, page_size=page_size)
        known = batch.seq_lens_cpu
        pages = kv_indices(
            context.req_to_token_pool,
            batch.req_pool_indices,
            indptr,
            page_size=page_size,
            total=None if known is None else int(((known + page_size - 1) // page_size).sum()),
        )
        width = -(-tables.max_seqlen_k // page_size)
        columns = torch.arange(width, dtype=torch.int32, device=pages.device)
        # A request's pages are followed by others', which its length hides.
        self._block_table = (indptr[:-1].unsqueeze(1) + columns).clamp_(max=max(len(pages) - 1, 0))
        self._pages = {group: group.translated(pages, context) for group in self._groups}
        self._staged = {}

    def _launch(self, q: torch.Tensor, layer: TRTLLMMHALayer, out: torch.Tensor) -> None:
        pages, tables = self._pages[layer.group], self._tables
        if not len(pages):
            return
        window = layer.layer.sliding_window_size
        self._kernels.trtllm_fmha_v2_prefill(
            (
                q if Rows.is_writable(q) else q.clone(memory_format=torch.contiguous_format),
                self._copied(layer, pages),
            ),
            "Q_PAGED_KV_NHD",
            self._workspace,
            self._kv_lens,
            tables.max_seqlen_q,
            max(tables.max_seqlen_k, tables.max_seqlen_q),
            layer.bmm1_scale,
            1.0,
            tables.batch_size,
            tables.query_bounds(q.device),
            self._kv_bounds,
            block_tables=self._block_table,
            out=out,
            sinks=layer.layer.sinks,
            # Without the mode a window of 0 would be none.
            mask_mode="sliding_window" if window >= 0 else "causal",
            window_left=window,
        )

    def _copied(self, layer: TRTLLMMHALayer, pages: torch.Tensor) -> torch.Tensor:
        """[pages of the step, 2, page, Hkv, D]: K and V of the layer."""
        page = layer.kv[0].shape[1:]
        staged = self._staged.get(page)
        if staged is None:
            whole = self._context.workspace.tensor(
                "trtllm staged keys", (len(pages), 2, *page), layer.kv[0].dtype
            )
            staged = self._staged[page] = whole, whole[:, 0], whole[:, 1]
        whole, *halves = staged
        for cache, half in zip(layer.kv, halves, strict=True):
            torch.index_select(cache, 0, pages, out=half)
        return whole
