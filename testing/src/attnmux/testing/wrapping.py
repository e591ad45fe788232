"""A backend around another one, for checks that watch what passes."""

from __future__ import annotations

import copy

from attnmux.core import AttentionBackend, ForwardBatch, ForwardMode, LinearAttentionBackend
from attnmux.core.composites import DispatchingBackend


class WrappingBackend(DispatchingBackend):
    """Passes every call on to `backend`."""

    def __init__(self, backend: AttentionBackend) -> None:
        super().__init__(backend.context, backend.options)
        self.backend = backend

    def serving(self, batch: ForwardBatch) -> AttentionBackend:
        return self.backend

    def select(self, mode: ForwardMode) -> AttentionBackend:
        """The backend of that mode, in a wrapper that shares this one's state."""
        child = self.backend.select(mode)
        if child is self.backend:
            return self
        wrapped = copy.copy(self)
        wrapped.backend = child
        return wrapped

    def linear(self, kind: str) -> LinearAttentionBackend:
        return self.backend.linear(kind)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self.backend.init_cuda_graph_state(max_bs, max_num_tokens)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return self.backend.get_cuda_graph_seq_len_fill_value()
