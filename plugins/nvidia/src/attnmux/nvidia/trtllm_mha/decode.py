"""Steps with the same number of queries a request: decode, and verify over chains of drafts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch

from attnmux.core.context import BackendContext
from attnmux.core.errors import InvalidInput
from attnmux.nvidia.latent import KeyLens
from attnmux.nvidia.page_tables import KeyGroup, Keys, Step, fixed_buffers
from attnmux.nvidia.rows import aligned, is_writable
from attnmux.nvidia.steps import check_room, prepared
from attnmux.nvidia.trtllm.workspace import BLOCK_ROWS
from attnmux.nvidia.trtllm_mha.masks import chain_mask

if TYPE_CHECKING:
    from attnmux.core.batch import ForwardBatch
    from attnmux.core.layer import LayerSpec
    from attnmux.nvidia.trtllm_mha.calls import LayerCall
    from attnmux.nvidia.trtllm_mha.kernels import Kernels


class Decode(ABC):
    """A step in page tables and lengths."""

    _answers_empty = False
    """Whether a request without keys may be given to the kernel, and becomes 0. If not, it is given
    a key, and its row is replaced."""

    def __init__(
        self,
        kernels: Kernels,
        context: BackendContext,
        calls: tuple[LayerCall, ...],
        workspace: torch.Tensor,
    ) -> None:
        self._kernels = kernels
        self._context = context
        self._groups: tuple[KeyGroup, ...] = tuple(dict.fromkeys(call.group for call in calls))
        self._has_windows = any(call.layer.sliding_window_size >= 0 for call in calls)
        self._workspace = workspace
        self._fixed: dict[KeyGroup, Keys] = {}
        self._fixed_lens: KeyLens | None = None
        self._fixed_batch_size = 0
        self._outgrown: list[tuple[dict[KeyGroup, Keys], KeyLens | None]] = []
        self._step: Step | None = None
        self._lens: KeyLens | None = None
        self._may_be_empty = False

    def init_graphs(self, max_batch_size: int) -> None:
        """Buffers for graphs; those of earlier ones stay."""
        if max_batch_size > self._fixed_batch_size:
            self._outgrown.append((self._fixed, self._fixed_lens))
            self._fixed = fixed_buffers(self._groups, max_batch_size, self._context)
            self._fixed_lens = KeyLens.buffers(max_batch_size, self._context.device)
            self._fixed_batch_size = max_batch_size

    def plan(self, batch: ForwardBatch, in_capture: bool) -> None:
        """The step's shape, from the host alone. Raises GraphUnsupported without buffers for it."""
        if in_capture:
            check_room(batch, self._fixed_batch_size)
        self._step = Step.of(batch, self._context, self._fixed if in_capture else {})
        # A draft is a key of its own.
        known = None if in_capture else batch.seq_lens_cpu
        self._may_be_empty = (
            not self._answers_empty
            and batch.forward_mode.is_decode()
            and (known is None or not bool(known.all()))
        )

    def fill(self, batch: ForwardBatch) -> None:
        """Page tables and lengths, by device operations of static shape."""
        step = prepared(self._step)
        step.fill(batch, self._groups, self._context)
        self._lens = None
        if self._may_be_empty:
            buffers = self._fixed_lens if step.fixed else None
            self._lens = KeyLens.of(batch.seq_lens, buffers)

    def attend(self, q: torch.Tensor, call: LayerCall, out: torch.Tensor) -> torch.Tensor:
        """q: [T, Hq, D]. out: [T, Hq, D], contiguous."""
        step, lens = prepared(self._step), self._lens
        keys = step.keys[call.group]
        self._launch(q, call, step, keys if lens is None else _with(keys, lens), out)
        if lens is not None:
            lens.replace(out, 0)
        return out

    @abstractmethod
    def _launch(
        self, q: torch.Tensor, call: LayerCall, step: Step, keys: Keys, out: torch.Tensor
    ) -> None:
        """Write `out`."""


MOST_HEADS = 16
"""Query heads of a KV head that XQA compiles for, whatever K and V are: with 17 to 24 it stops in
mha_sm90.cu (`storeGemm0AccToShm`), beyond 32 in mha.cu too (`copyPartialHeadsAsync`)."""

FLOOR = -9e4
"""A sink that no other row notices. A row without keys has -1e5 for its maximum (utils.cuh,
`safeInitRowMax`), so that its zeros are divided by infinity and not by 0."""


class XQADecode(Decode):
    """XQA: it is told addresses, no strides. Drafts see each other by a mask.

    Where K and V are 8-bit floats, on SM90 nothing is written to the row of a request without keys.
    Elsewhere a sink makes it 0, which spares a launch for each layer: those without have one that
    changes nothing else.
    """

    def __init__(
        self,
        kernels: Kernels,
        context: BackendContext,
        calls: tuple[LayerCall, ...],
        workspace: torch.Tensor,
    ) -> None:
        """Raises InvalidInput for layers of more heads a group than there are kernels for."""
        super().__init__(kernels, context, calls, workspace)
        groups = {call.layer.layer_id: _group_size(call.layer) for call in calls}
        with_sinks = (call.layer.layer_id for call in calls if call.layer.sinks is not None)
        self._groups_with_sinks = {groups[layer_id] for layer_id in with_sinks}
        self._answers_empty = not any(call.is_fp8 for call in calls)
        self._arguments = {call.layer.layer_id: call.arguments for call in calls}
        if self._answers_empty:
            most = max(call.layer.tp_q_head_num for call in calls)
            floor = torch.full((most,), FLOOR, device=context.device)
            for call in calls:
                if call.layer.sinks is None:
                    sinks = floor[: call.layer.tp_q_head_num]
                    self._arguments[call.layer.layer_id] = {**call.arguments, "sinks": sinks}
        # Graphs point at them.
        self._masks: dict[tuple[int, int], torch.Tensor] = {}

    def plan(self, batch: ForwardBatch, in_capture: bool) -> None:
        """Raises InvalidInput for drafts in layers with a window: XQA skips whole tiles by the last
        draft's window and masks nothing within them (mha.cu, `nbTotalSkipTokens`); and in layers
        with sinks whose groups do not begin where blocks do: a row is given the sink of its place
        in its block (mha.cu, `addAttentionSinksSpecDec`)."""
        super().plan(batch, in_capture)
        drafts = prepared(self._step).queries_each or 1
        if drafts == 1:
            return
        if self._has_windows:
            raise InvalidInput(
                "sliding_window_size", came="a window in a verify step", expected="-1 in all layers"
            )
        for group in self._groups_with_sinks:
            if drafts * group > BLOCK_ROWS and BLOCK_ROWS % group:
                raise InvalidInput(
                    "sinks",
                    came=f"sinks of groups of {group} heads in a verify step of {drafts} drafts",
                    expected=f"groups of which {BLOCK_ROWS} rows are a multiple, or fewer rows",
                )
        key = batch.batch_size, drafts
        if key not in self._masks:
            self._masks[key] = chain_mask(*key, self._context.device)

    def _launch(
        self, q: torch.Tensor, call: LayerCall, step: Step, keys: Keys, out: torch.Tensor
    ) -> None:
        each = step.queries_each or 1
        self._kernels.xqa_batch_decode_with_kv_cache(
            q if is_writable(q) else q.clone(memory_format=torch.contiguous_format),
            call.kv,
            self._workspace,
            keys.page_table,
            keys.lens,
            step.max_seqlen_k,
            out=out,
            q_len_per_req=each,
            mask=None if each == 1 else self._masks[step.batch_size, each],
            **self._arguments[call.layer.layer_id],
        )


class GenDecode(Decode):
    """trtllm-gen: causal from the end of the keys, with Q in the dtype of K and V."""

    def _launch(
        self, q: torch.Tensor, call: LayerCall, step: Step, keys: Keys, out: torch.Tensor
    ) -> None:
        self._kernels.trtllm_batch_decode_with_kv_cache(
            aligned(call.queries(q)),
            call.kv,
            self._workspace,
            keys.page_table,
            keys.lens,
            step.max_seqlen_k,
            out=out,
            backend="trtllm-gen",
            q_len_per_req=step.queries_each or 1,
            **call.arguments,
        )


def _group_size(layer: LayerSpec) -> int:
    """Query heads of a KV head. Raises InvalidInput for more than XQA has kernels for."""
    group = layer.tp_q_head_num // layer.tp_k_head_num
    if group > MOST_HEADS:
        raise InvalidInput(
            f"layer {layer.layer_id}",
            came=f"{group} query heads of one KV head",
            expected=f"{MOST_HEADS} or fewer, which XQA compiles for",
        )
    return group


def _with(keys: Keys, lens: KeyLens) -> Keys:
    return Keys(page_table=keys.page_table, lens=lens.at_least_one)
