"""A backend around another one, for checks that watch what passes."""

from __future__ import annotations

import copy
from typing import Any

from attnmux.core import (
    AttentionBackend,
    DispatchingBackend,
    ForwardBatch,
    ForwardMode,
)


class WrappingBackend(DispatchingBackend):
    """Passes every call on to `backend`."""

    def __init__(self, backend: AttentionBackend) -> None:
        super().__init__(backend.context, (backend,))
        self.options = backend.options
        self.backend = backend

    def serving(self, batch: ForwardBatch) -> AttentionBackend:
        return self.backend

    def select(self, mode: ForwardMode) -> AttentionBackend:
        """The backend of that mode, in a wrapper that shares this one's state."""
        child = self.backend.select(mode)
        if child is self.backend:
            return self
        wrapped = copy.copy(self)
        wrapped.backend, wrapped.members = child, (child,)
        return wrapped

    def linear(self, kind: str) -> Any:  # noqa: ANN401  # a backend of linear layers
        return self.backend.linear(kind)
