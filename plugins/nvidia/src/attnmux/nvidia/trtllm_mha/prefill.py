"""Steps with any number of queries a request, over the pool's pages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch

from attnmux.core.context import BackendContext
from attnmux.core.errors import GraphUnsupported
from attnmux.core.indices import cu_seqlens
from attnmux.nvidia.page_tables import KeyGroup, Step
from attnmux.nvidia.rows import aligned
from attnmux.nvidia.steps import prepared

if TYPE_CHECKING:
    from attnmux.core.batch import ForwardBatch
    from attnmux.nvidia.trtllm_mha.calls import LayerCall
    from attnmux.nvidia.trtllm_mha.kernels import Kernels


class Prefill(ABC):
    """What all of them have in common: bounds of queries and keys, and rows of no request."""

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
        self._workspace = workspace
        self._step: Step | None = None
        self._is_whole = False

    def plan(self, batch: ForwardBatch, in_capture: bool) -> None:
        """The step's shape, from the host alone. Raises GraphUnsupported in a capture."""
        if in_capture:
            raise GraphUnsupported(
                f"{batch.forward_mode.name} runs without a graph: only steps with the same number "
                "of tokens for each request are captured"
            )
        self._step = Step.of(batch, self._context, {})
        lens = batch.extend_seq_lens_cpu
        self._is_whole = lens is not None and int(lens.sum()) == batch.num_tokens

    @abstractmethod
    def fill(self, batch: ForwardBatch) -> None:
        """What the layers read, on the device."""

    def attend(self, q: torch.Tensor, call: LayerCall, out: torch.Tensor) -> torch.Tensor:
        """q: [T, Hq, D]. out: [T, Hq, D], contiguous. Rows of no request become 0."""
        if not self._is_whole:
            out.zero_()
        self._launch(q, call, prepared(self._step), out)
        return out

    @abstractmethod
    def _launch(self, q: torch.Tensor, call: LayerCall, step: Step, out: torch.Tensor) -> None:
        """Write the requests' rows of `out`."""


class GenPrefill(Prefill):
    """trtllm-gen: causal from the end of the keys, with Q in the dtype of K and V."""

    _kv_bounds: torch.Tensor

    def fill(self, batch: ForwardBatch) -> None:
        prepared(self._step).fill(batch, self._groups, self._context)
        self._kv_bounds = cu_seqlens(batch.seq_lens)

    def _launch(self, q: torch.Tensor, call: LayerCall, step: Step, out: torch.Tensor) -> None:
        keys = step.keys[call.group]
        self._kernels.trtllm_batch_context_with_kv_cache(
            aligned(call.queries(q)),
            call.kv,
            self._workspace,
            keys.page_table,
            keys.lens,
            step.max_seqlen_q,
            step.max_seqlen_k,
            batch_size=step.batch_size,
            cum_seq_lens_q=step.query_bounds(q.device),
            cum_seq_lens_kv=self._kv_bounds,
            out=out,
            **call.arguments,
        )
