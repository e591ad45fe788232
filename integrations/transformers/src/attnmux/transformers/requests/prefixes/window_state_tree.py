"""Prefixes of models with both window layers and recurrent layers."""

from __future__ import annotations

from attnmux.core import LinearStatePool
from attnmux.transformers.requests.prefixes.node import PrefixNode
from attnmux.transformers.requests.prefixes.state_tree import StatePrefixTree
from attnmux.transformers.requests.prefixes.window_tree import WindowPrefixTree, WindowSpan
from attnmux.transformers.requests.slots import SWAAllocator


class WindowStatePrefixTree(StatePrefixTree, WindowPrefixTree):
    """A prefix tree whose prefixes are continued where their states were kept and the windows at
    their ends are still there."""

    def __init__(
        self,
        allocator: SWAAllocator,
        page_size: int,
        span: WindowSpan,
        states: LinearStatePool,
    ) -> None:
        """Raises InvalidInput as `PrefixTree` does."""
        self.states = states
        WindowPrefixTree.__init__(self, allocator, page_size, span)

    def _may_end(self, node: PrefixNode) -> bool:
        return node in self._kept or super()._may_end(node)
