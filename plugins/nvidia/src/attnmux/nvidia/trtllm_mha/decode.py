"""Steps with the same number of queries a request: decode, and verify over chains of drafts."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

import torch

from attnmux.core import InvalidInput
from attnmux.core.plugin import DecodeBuffers, DecodeStep, LibraryBackend, Rows
from attnmux.nvidia.kernel_rows import FP8
from attnmux.nvidia.trtllm import BLOCK_ROWS, queries_like
from attnmux.nvidia.trtllm_mha.layers import Half, TRTLLMMHAKernels, TRTLLMMHALayer

if TYPE_CHECKING:
    from attnmux.core import BackendContext, ForwardBatch, LayerSpec
    from attnmux.core.plugin import Keys

MOST_HEADS = 16
"""Query heads of a KV head that XQA compiles for, whatever K and V are: with 17 to 24 it stops in
mha_sm90.cu (`storeGemm0AccToShm`), beyond 32 in mha.cu too (`copyPartialHeadsAsync`)."""

FLOOR = -9e4
"""A sink that no other row notices. A row without keys has -1e5 for its maximum (utils.cuh,
`safeInitRowMax`), so that its zeros are divided by infinity and not by 0."""


class Decode(Half):
    """A request without keys is given one, and its row is replaced by zeros."""

    _step: DecodeStep

    def plan(self, batch: ForwardBatch, buffers: DecodeBuffers | None) -> None:
        self._step = DecodeStep.of(batch, self._context, buffers)

    def fill(self, batch: ForwardBatch) -> None:
        self._step.fill(batch, self._groups, self._context)

    def attend(self, q: torch.Tensor, layer: TRTLLMMHALayer, out: torch.Tensor) -> None:
        self._launch(q, layer, LibraryBackend.filled(self._step.keys)[layer.group], out)
        self._step.replace_empty(out)

    @abstractmethod
    def _launch(
        self, q: torch.Tensor, layer: TRTLLMMHALayer, keys: Keys, out: torch.Tensor
    ) -> None:
        """Write `out`, in which rows of requests without keys may be anything."""


class XQADecode(Decode):
    """XQA, which takes addresses and no strides. Drafts see each other by a mask.

    If K and V are 8-bit floats, on SM90 nothing is written to the row of a request without keys.
    Elsewhere a sink makes it 0, which spares a launch for each layer: layers without sinks get one
    that changes nothing else.
    """

    def __init__(
        self,
        kernels: TRTLLMMHAKernels,
        context: BackendContext,
        layers: tuple[TRTLLMMHALayer, ...],
        workspace: torch.Tensor,
    ) -> None:
        """Raises InvalidInput for layers of more heads a group than there are kernels for."""
        super().__init__(kernels, context, layers, workspace)
        groups = [(_group_size(layer.layer), layer.layer.sinks is not None) for layer in layers]
        self._groups_with_sinks = {group for group, has_sinks in groups if has_sinks}
        self._has_windows = any(layer.layer.sliding_window_size >= 0 for layer in layers)
        self._sinks_zero_rows = not any(layer.kv[0].dtype == FP8 for layer in layers)
        most = max(layer.layer.tp_q_head_num for layer in layers)
        floor = torch.full((most,), FLOOR, dtype=torch.float32, device=context.device)
        self._arguments = {}
        for layer in layers:
            sinks = layer.layer.sinks
            if sinks is None and self._sinks_zero_rows:
                sinks = floor[: layer.layer.tp_q_head_num]
            self._arguments[layer.layer.layer_id] = {**layer.arguments, "sinks": sinks}
        # Kept, since graphs read them.
        self._masks: dict[tuple[int, int], torch.Tensor] = {}

    def plan(self, batch: ForwardBatch, buffers: DecodeBuffers | None) -> None:
        super().plan(batch, buffers)
        self._step.may_be_empty &= not self._sinks_zero_rows
        drafts = self._step.tables.queries_each or 1
        if drafts == 1:
            return
        self._check_drafts(drafts)
        key = batch.batch_size, drafts
        if key not in self._masks:
            self._masks[key] = chain_mask(*key, self._context.device)

    def _check_drafts(self, drafts: int) -> None:
        """Raises InvalidInput for layers with a window: XQA skips whole tiles by the last draft's
        window and masks nothing within them (mha.cu, `nbTotalSkipTokens`); and for layers with
        sinks whose groups do not begin where blocks do: a row is given the sink of its place in its
        block (mha.cu, `addAttentionSinksSpecDec`)."""
        if self._has_windows:
            raise InvalidInput(
                "sliding_window_size", got="a window in a verify step", expected="-1 in all layers"
            )
        for group in self._groups_with_sinks:
            if drafts * group > BLOCK_ROWS and BLOCK_ROWS % group:
                raise InvalidInput(
                    "sinks",
                    got=f"sinks of groups of {group} heads in a verify step of {drafts} drafts",
                    expected=f"groups that divide {BLOCK_ROWS} rows, or fewer rows",
                )

    def _launch(
        self, q: torch.Tensor, layer: TRTLLMMHALayer, keys: Keys, out: torch.Tensor
    ) -> None:
        tables = self._step.tables
        queries = tables.queries_each or 1
        self._kernels.xqa_batch_decode_with_kv_cache(
            q if Rows.is_writable(q) else q.clone(memory_format=torch.contiguous_format),
            layer.kv,
            self._workspace,
            keys.page_table,
            keys.lens,
            tables.max_seqlen_k,
            out=out,
            q_len_per_req=queries,
            mask=None if queries == 1 else self._masks[tables.batch_size, queries],
            **self._arguments[layer.layer.layer_id],
        )


class GeneratedDecode(Decode):
    """trtllm-gen: causal from the end of the keys, with Q in the dtype of K and V."""

    def _launch(
        self, q: torch.Tensor, layer: TRTLLMMHALayer, keys: Keys, out: torch.Tensor
    ) -> None:
        self._kernels.trtllm_batch_decode_with_kv_cache(
            Rows.aligned(queries_like(q, layer.kv[0])),
            layer.kv,
            self._workspace,
            keys.page_table,
            keys.lens,
            self._step.tables.max_seqlen_k,
            out=out,
            backend="trtllm-gen",
            q_len_per_req=self._step.tables.queries_each or 1,
            **layer.arguments,
        )


def chain_mask(batch_size: int, drafts: int, device: torch.device) -> torch.Tensor:
    """[B, d, 2 * ceil(d / 32)] uint16: bit j of row i says that token i sees token j <= i.

    Rows are whole words of 32 bits (xqa.py, `mask`). The kernel reads every request's.
    """
    words = -(-drafts // 32) * 2
    rows = [
        [((2 << token) - 1) >> (16 * word) & 0xFFFF for word in range(words)]
        for token in range(drafts)
    ]
    # Few operations know unsigned words.
    bits = torch.tensor(rows, dtype=torch.int32).to(torch.int16).to(device)
    return bits.expand(batch_size, -1, -1).contiguous().view(torch.uint16)


def _group_size(layer: LayerSpec) -> int:
    """Query heads of a KV head. Raises InvalidInput for more than XQA has kernels for."""
    group = layer.tp_q_head_num // layer.tp_k_head_num
    if group > MOST_HEADS:
        raise InvalidInput(
            f"layer {layer.layer_id}",
            got=f"{group} query heads of one KV head",
            expected=f"{MOST_HEADS} or fewer, which XQA compiles for",
        )
    return group
