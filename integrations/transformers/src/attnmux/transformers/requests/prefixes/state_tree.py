"""Prefixes of models with recurrent layers: each is reused only if its states were kept."""

from __future__ import annotations

from attnmux.core import InvalidInput
from attnmux.parts import LinearStatePool
from attnmux.transformers.requests.prefixes.node import PrefixNode
from attnmux.transformers.requests.prefixes.tree import PrefixTree
from attnmux.transformers.requests.slots import PagedAllocator


class StatePrefixTree(PrefixTree):
    """A prefix tree that keeps the linear layers' states after some of its prefixes.

    A state holds all tokens before it, so that a request can only continue where one was kept: at
    the end of a node. The states lie in the rows of the pool after those of requests, and the least
    recently used ones make room for others. `match` returns the longest prefix with states;
    `PrefixMatch.known` says how far the tokens themselves are cached. A request that runs up to
    there, and then calls `keep`, lets the next one begin there.
    """

    def __init__(self, allocator: PagedAllocator, states: LinearStatePool) -> None:
        self.states = states
        super().__init__(allocator)

    def _continues(self, node: PrefixNode) -> bool:
        return node in self._kept and super()._continues(node)

    def keep(self, node: PrefixNode, row: int) -> None:
        """Keep the states in a request's row, those after the prefix that ends in `node`.

        Does nothing for the empty prefix, for one whose states are kept, and without rows to keep
        them in. Raises InvalidInput for a node that was evicted.
        """
        self._check_alive(node)
        if node.is_root or node in self._kept or not self.states.kept_size:
            return
        if not self._free_rows:
            self._forget(min(self._kept, key=lambda kept: kept.used))
        self._kept[node] = self._free_rows.pop()
        self.states.copy(row, self._kept[node])

    def restore(self, node: PrefixNode, row: int) -> None:
        """Give a request's row the states after the prefix that ends in `node`, as from `match`.

        Raises InvalidInput for a prefix without states. After the empty one, a request starts from
        zeros whatever its row holds.
        """
        if node.is_root:
            return
        if node not in self._kept:
            got, expected = "a prefix without states", "that of the latest match"
            raise InvalidInput("node", got=got, expected=expected)
        self.states.copy(self._kept[node], row)

    def reset(self) -> None:
        super().reset()
        self._kept: dict[PrefixNode, int] = {}
        """The rows of the nodes whose states are kept."""
        self._free_rows = [*self.states.kept_rows]

    def _forget(self, node: PrefixNode) -> None:
        row = self._kept.pop(node, None)
        if row is not None:
            self._free_rows.append(row)

    def _remove(self, leaf: PrefixNode) -> None:
        self._forget(leaf)
        super()._remove(leaf)
