"""The backend of a step that is captured in pieces: a call of attention ends one and begins the
next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import NamedTuple

import torch

from attnmux.core.contract.backend import AttentionBackend
from attnmux.core.contract.batch import ForwardBatch
from attnmux.core.contract.call import AttentionCall
from attnmux.core.contract.latent import UpProjection
from attnmux.core.contract.layer import LayerSpec
from attnmux.core.facts.errors import GraphUnsupported
from attnmux.core.graph.devices import CapturedGraph, DeviceGraphs


class Call(NamedTuple):
    """One call of attention between two pieces."""

    attend: Callable[..., object]
    """Takes the backend, the step's batch, and the step's rows of the tensors."""
    tensors: Sequence[torch.Tensor | None]
    """Rows of a padded size, in the memory of graphs. The last tensor is the result, which the next
    piece reads."""

    def run(self, backend: AttentionBackend, batch: ForwardBatch) -> None:
        num_tokens, out = batch.num_tokens, self.tensors[-1]
        if out is None or num_tokens == out.shape[0]:
            self.attend(backend, batch, *self.tensors)
            return
        rows = [None if tensor is None else tensor[:num_tokens] for tensor in self.tensors]
        self.attend(backend, batch, *rows)
        out[num_tokens:].zero_()


class CapturedPieces(NamedTuple):
    """A step of one number of tokens."""

    pieces: Sequence[CapturedGraph]
    """One more than the calls: the last one follows them."""
    calls: Sequence[Call]

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)


class Breaks(AttentionBackend):
    """The backend of a step that is captured: a call of attention ends one piece and begins the
    next. Nothing is attended to and no K and V are written: a replay calls the real backend."""

    def __init__(self, backend: AttentionBackend, devices: DeviceGraphs) -> None:
        super().__init__(backend.context, backend.options)
        self._devices = devices
        self._open: ExitStack | None = None
        self._pieces: list[CapturedGraph] = []
        self._calls: list[Call] = []

    def capture(self, run_model: Callable[[], object]) -> CapturedPieces:
        """Call the model once. Raises GraphUnsupported for a piece that cannot be replayed."""
        with ExitStack() as self._open:
            self._begin(self._open)
            run_model()
        self._open = None
        return CapturedPieces(tuple(self._pieces), tuple(self._calls))

    def _begin(self, stack: ExitStack) -> None:
        self._pieces.append(stack.enter_context(self._devices.piece()))

    def _break(self, attend: Callable[..., object], *tensors: torch.Tensor | None) -> None:
        """End a piece and begin the next. The arguments are those of `Call`."""
        out = tensors[-1]
        if self._open is not None:
            self._open.close()
            unowned = self._devices.unowned
            kept = [None if tensor is None else unowned(tensor) for tensor in tensors]
            self._calls.append(Call(attend, kept))
            self._begin(self._open)
        elif out is not None:
            out.zero_()  # a warm-up, in which later layers read it

    def init_forward_metadata_out_graph(
        self, batch: ForwardBatch, in_capture: bool = False
    ) -> None:
        """Nothing: attention is prepared for the step's own batch."""

    def save_kv(
        self,
        k: torch.Tensor,
        v: torch.Tensor | None,
        layer: LayerSpec,
        batch: ForwardBatch,
        *,
        k_rope: torch.Tensor | None = None,
    ) -> None:
        """Nothing: the real backend writes K and V of the step's own tokens."""

    def forward_decode(self, call: AttentionCall, batch: ForwardBatch) -> torch.Tensor:
        raise NotImplementedError("a step over prompts")

    def forward_extend(self, call: AttentionCall, batch: ForwardBatch) -> torch.Tensor:
        layer, saves, out = call.layer, call.save_kv_cache, call.out
        if call.lse is not None:
            raise GraphUnsupported("a layer's result depends on the LSE of its attention")
        if out is None:
            out = call.q.new_empty((call.q.shape[0], layer.tp_q_head_num, layer.v_head_dim))

        def attend(
            backend: AttentionBackend,
            step: ForwardBatch,
            q: torch.Tensor,
            k: torch.Tensor | None,
            v: torch.Tensor | None,
            q_rope: torch.Tensor | None,
            k_rope: torch.Tensor | None,
            out: torch.Tensor,
        ) -> None:
            ropes = {"q_rope": q_rope, "k_rope": k_rope}
            backend.forward(q, k, v, layer, step, saves, out=out, **ropes)

        self._break(attend, call.q, call.k, call.v, call.q_rope, call.k_rope, out)
        return out

    def forward_latent(
        self,
        q: torch.Tensor,
        latent: torch.Tensor,
        k_rope: torch.Tensor,
        layer: LayerSpec,
        batch: ForwardBatch,
        projection: UpProjection,
    ) -> torch.Tensor:
        out = q.new_empty((*q.shape[:2], projection.v_head_dim))

        def attend(
            backend: AttentionBackend,
            step: ForwardBatch,
            q: torch.Tensor,
            latent: torch.Tensor,
            k_rope: torch.Tensor,
            out: torch.Tensor,
        ) -> None:
            out.copy_(backend.forward_latent(q, latent, k_rope, layer, step, projection))

        self._break(attend, q, latent, k_rope, out)
        return out
