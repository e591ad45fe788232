"""Prefill by fmha_v2, which wants K and V of a page side by side in one tensor.

Its paged layout is `[pages, 2, page, Hkv, D]`, and an entry p of a block table leads to K at block
2p and to V at block 2p + 1 of it (paged_kv_cache.h). The pool's K and V lie apart, so that each
layer copies the step's pages to such a tensor, which all layers share. The ragged layouts are no
way around it: on SM90 they read zeros for keys beyond the number of queries (dma.h,
`total_seqlen`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attnmux.core.context import BackendContext
from attnmux.core.errors import InvalidInput
from attnmux.core.indices import cu_seqlens, kv_indices, kv_indptr
from attnmux.nvidia.page_tables import KeyGroup, Step
from attnmux.nvidia.rows import is_writable
from attnmux.nvidia.steps import prepared
from attnmux.nvidia.trtllm_mha.prefill import Prefill

if TYPE_CHECKING:
    from attnmux.core.batch import ForwardBatch
    from attnmux.nvidia.trtllm_mha.calls import LayerCall
    from attnmux.nvidia.trtllm_mha.kernels import Kernels

_TILE_COUNTER_BYTES = 1 << 20
"""One counter of tiles, cleared before a launch and left at what it came to (fmha_v2_run.cu)."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Staged:
    """Where layers with pages of one shape copy them in a step."""

    whole: torch.Tensor
    """[pages of the step, 2, page, Hkv, D]."""
    halves: tuple[torch.Tensor, torch.Tensor]
    """Of K and of V."""


class StagedPrefill(Prefill):
    """fmha_v2: it is told addresses, no strides.

    There are no kernels for 8-bit floats; those for float16 add up in float16, logits and values
    both (fmha_v2_run.cu, `acc_type`): the sum of a few hundred values is infinite, or off by more
    than float16's own rounding.
    """

    def __init__(
        self,
        kernels: Kernels,
        context: BackendContext,
        calls: tuple[LayerCall, ...],
        workspace: torch.Tensor,
    ) -> None:
        # Not the decode kernels' memory: where this one leaves its count they want zeros.
        own = context.workspace.get("trtllm fmha_v2", _TILE_COUNTER_BYTES)
        super().__init__(kernels, context, calls, own)
        self._kv_lens: torch.Tensor
        self._kv_bounds: torch.Tensor
        self._block_table: torch.Tensor
        self._pages: dict[KeyGroup, torch.Tensor] = {}
        self._staged: dict[torch.Size, Staged] = {}

    def plan(self, batch: ForwardBatch, in_capture: bool) -> None:
        """Raises InvalidInput for a pool of anything but bfloat16."""
        dtype = self._context.token_to_kv_pool.dtype
        if dtype != torch.bfloat16:
            raise InvalidInput(
                "token_to_kv_pool",
                came=dtype,
                expected=f"{torch.bfloat16} for prefill: fmha_v2 adds up in float32 there alone",
            )
        super().plan(batch, in_capture)

    def fill(self, batch: ForwardBatch) -> None:
        """The step's pages, one request's behind the other's, and where they begin."""
        step, pool = prepared(self._step), self._context.token_to_kv_pool
        page_size = pool.page_size
        if batch.extend_seq_lens is not None:
            step.bounds["queries"] = cu_seqlens(batch.extend_seq_lens)
        self._kv_lens, self._kv_bounds = batch.seq_lens, cu_seqlens(batch.seq_lens)
        indptr = kv_indptr(batch.seq_lens, page_size=page_size)
        known = batch.seq_lens_cpu
        pages = kv_indices(
            self._context.req_to_token_pool.req_to_token,
            batch.req_pool_indices,
            indptr,
            page_size=page_size,
            total=None if known is None else int(((known + page_size - 1) // page_size).sum()),
        )
        width = -(-step.max_seqlen_k // page_size)
        columns = torch.arange(width, dtype=torch.int32, device=pages.device)
        # Behind a request's pages are others', which its length hides.
        self._block_table = (indptr[:-1].unsqueeze(1) + columns).clamp_(max=max(len(pages) - 1, 0))
        self._pages = {group: group.translated(pages, self._context) for group in self._groups}
        self._staged = {}

    def _launch(self, q: torch.Tensor, call: LayerCall, step: Step, out: torch.Tensor) -> None:
        pages = self._pages[call.group]
        if not len(pages):
            return
        window = call.layer.sliding_window_size
        self._kernels.trtllm_fmha_v2_prefill(
            (
                q if is_writable(q) else q.clone(memory_format=torch.contiguous_format),
                self._copied(call, pages),
            ),
            "Q_PAGED_KV_NHD",
            self._workspace,
            self._kv_lens,
            step.max_seqlen_q,
            max(step.max_seqlen_k, step.max_seqlen_q),
            call.bmm1_scale,
            1.0,
            step.batch_size,
            step.query_bounds(q.device),
            self._kv_bounds,
            block_tables=self._block_table,
            out=out,
            sinks=call.layer.sinks,
            # By the window alone, one of 0 would be none.
            mask_mode="sliding_window" if window >= 0 else "causal",
            window_left=window,
        )

    def _copied(self, call: LayerCall, pages: torch.Tensor) -> torch.Tensor:
        """[pages of the step, 2, page, Hkv, D]: K and V of the layer."""
        page = call.kv[0].shape[1:]
        staged = self._staged.get(page)
        if staged is None:
            whole = self._context.workspace.tensor(
                "trtllm staged keys", (len(pages), 2, *page), call.kv[0].dtype
            )
            staged = self._staged[page] = Staged(whole=whole, halves=(whole[:, 0], whole[:, 1]))
        for cache, half in zip(call.kv, staged.halves, strict=True):
            torch.index_select(cache, 0, pages, out=half)
        return staged.whole
