"""Steps with the same number of queries a request: decode, and verify over chains of drafts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch

from attnmux.core.backend import BackendContext
from attnmux.core.errors import InvalidInput
from attnmux.nvidia.latent import KeyLens
from attnmux.nvidia.page_tables import KeyGroup, Keys, Step, fixed_buffers
from attnmux.nvidia.rows import aligned, is_writable
from attnmux.nvidia.steps import check_room, prepared
from attnmux.nvidia.trtllm_mha.masks import chain_mask

if TYPE_CHECKING:
    from attnmux.core.batch import ForwardBatch
    from attnmux.nvidia.trtllm_mha.calls import LayerCall
    from attnmux.nvidia.trtllm_mha.kernels import Kernels


class Decode(ABC):
    """A step in page tables and lengths. Neither kernel may be given a request without keys."""

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
        self._may_be_empty = batch.forward_mode.is_decode() and (
            known is None or not bool(known.all())
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


class XQADecode(Decode):
    """XQA: it is told addresses, no strides. Drafts see each other by a mask."""

    def __init__(
        self,
        kernels: Kernels,
        context: BackendContext,
        calls: tuple[LayerCall, ...],
        workspace: torch.Tensor,
    ) -> None:
        super().__init__(kernels, context, calls, workspace)
        # Graphs point at them.
        self._masks: dict[tuple[int, int], torch.Tensor] = {}

    def plan(self, batch: ForwardBatch, in_capture: bool) -> None:
        """Raises InvalidInput for drafts in layers with a window: XQA skips whole tiles by the last
        draft's window and masks nothing within them (mha.cu, `nbTotalSkipTokens`)."""
        super().plan(batch, in_capture)
        drafts = prepared(self._step).queries_each or 1
        if drafts == 1:
            return
        if self._has_windows:
            raise InvalidInput(
                "sliding_window_size", came="a window in a verify step", expected="-1 in all layers"
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
            **call.arguments,
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


def _with(keys: Keys, lens: KeyLens) -> Keys:
    return Keys(page_table=keys.page_table, lens=lens.at_least_one)
