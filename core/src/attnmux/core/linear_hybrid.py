"""Attention and linear layers of one model: every step is prepared once for all of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from attnmux.core.batch import ForwardMode
from attnmux.core.choosing.common.frozen import FrozenMapping
from attnmux.core.composites import DispatchingBackend, Parts
from attnmux.core.errors import InvalidInput
from attnmux.core.linear_backend import LinearAttentionBackend

if TYPE_CHECKING:
    from attnmux.core.backend import AttentionBackend
    from attnmux.core.batch import ForwardBatch
    from attnmux.core.linear_call import ConvCall, LinearCall


class LinearByPhase(LinearAttentionBackend):
    """Sends decode steps to one backend and all others to another, over the same states."""

    def __init__(self, *, extend: LinearAttentionBackend, decode: LinearAttentionBackend) -> None:
        super().__init__(decode.context, decode.options)
        self.extend = extend
        self.decode = decode

    def _serving(self, batch: ForwardBatch) -> LinearAttentionBackend:
        return self.decode if batch.forward_mode.is_decode_or_idle() else self.extend

    def init_forward_metadata_out_graph(
        self, batch: ForwardBatch, in_capture: bool = False
    ) -> None:
        self._serving(batch).init_forward_metadata_out_graph(batch, in_capture)

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        self._serving(batch).init_forward_metadata_in_graph(batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self.decode.init_cuda_graph_state(max_bs, max_num_tokens)

    def forward_decode(self, call: LinearCall, batch: ForwardBatch) -> None:
        self.decode.forward_decode(call, batch)

    def forward_extend(self, call: LinearCall, batch: ForwardBatch) -> None:
        self.extend.forward_extend(call, batch)

    def forward_conv(self, call: ConvCall, batch: ForwardBatch) -> None:
        self._serving(batch).forward_conv(call, batch)


class HybridLinearAttnBackend(DispatchingBackend):
    """A model's attention backend, which also prepares the backends of its linear layers.

    Attention layers call it as any backend. Linear layers call `linear(kind)` with the same batch.
    """

    def __init__(
        self, full: AttentionBackend, linear: Mapping[str, LinearAttentionBackend]
    ) -> None:
        """linear: by kind. Raises InvalidInput without one."""
        if not linear:
            raise InvalidInput("linear", got="none", expected="a backend for each kind of layer")
        super().__init__(full.context, (full,))
        self.full = full
        self._linear: Mapping[str, LinearAttentionBackend] = FrozenMapping(linear)

    def linear(self, kind: str) -> LinearAttentionBackend:
        try:
            return self._linear[kind]
        except KeyError:
            expected = f"one of {', '.join(self._linear)}"
            raise InvalidInput("kind", got=kind, expected=expected) from None

    def select(self, mode: ForwardMode) -> AttentionBackend:
        child = self.full.select(mode)
        return self if child is self.full else HybridLinearAttnBackend(child, self._linear)

    def serving(self, batch: ForwardBatch) -> AttentionBackend:
        return self.full

    def parts(self, batch: ForwardBatch, *, eager: bool) -> Parts:
        return ((each, batch) for each in (self.full, *self._linear.values()))

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        for each in (self.full, *self._linear.values()):
            each.init_cuda_graph_state(max_bs, max_num_tokens)
