"""A node of the prefix tree: a run of whole pages that continues its parent's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from attnmux.core import InvalidInput

Page = tuple[int, ...]
"""The token ids of one page."""


def whole_pages(token_ids: Sequence[int], page_size: int) -> tuple[int, ...]:
    """The token ids that fill whole pages.

    Raises InvalidInput for a tensor: its elements compare by identity as keys, so that no prefix
    would be found again.
    """
    if isinstance(token_ids, torch.Tensor):
        raise InvalidInput(
            "token_ids", got="a tensor", expected="a sequence of ints: token_ids.tolist()"
        )
    return tuple(token_ids[: len(token_ids) - len(token_ids) % page_size])


@dataclass(kw_only=True, slots=True, eq=False)
class PrefixNode:
    """A run of pages that were used at the same time and are locked by the same requests."""

    parent: PrefixNode | None
    """None in a root, and in a node that was evicted."""
    tokens: tuple[int, ...]
    slots: torch.Tensor = field(repr=False)
    """[len(tokens)] int64"""
    used: int
    """When it was last matched or inserted."""
    children: dict[Page, PrefixNode] = field(default_factory=dict, repr=False)
    """By the first page of each."""
    locks: int = 0
    has_window: bool = True
    """Whether all of its pages have window pages; only a `WindowPrefixTree` sets it."""
    window_locks: int = 0
    is_offered: bool = False
    """Whether the tree's heap of leaves has an entry for it."""
    is_root: bool = field(init=False)
    end: int = field(init=False)
    """Tokens of the prefix that ends here."""

    def __post_init__(self) -> None:
        self.is_root = self.parent is None
        self.end = len(self.tokens) + (0 if self.parent is None else self.parent.end)

    @classmethod
    def root(cls) -> PrefixNode:
        """The empty prefix."""
        return cls(parent=None, tokens=(), slots=torch.empty(0, dtype=torch.int64), used=0)

    @property
    def start(self) -> int:
        """Tokens of the prefix that this node continues."""
        return self.end - len(self.tokens)

    @property
    def is_alive(self) -> bool:
        """Whether it is still in the tree. The empty prefix always is."""
        return self.is_root or self.parent is not None

    def path(self) -> Iterator[PrefixNode]:
        """The node, its parent and so on, without the root."""
        node: PrefixNode | None = self
        while node is not None and not node.is_root:
            yield node
            node = node.parent

    def common(self, tokens: tuple[int, ...], start: int, page_size: int) -> int:
        """The number of the node's tokens, in whole pages, that equal those from tokens[start] on.

        The first page is known to be equal. Slices are compared whole and halved if they
        differ, which is far faster than a comparison token by token.
        """
        most = min(len(self.tokens), len(tokens) - start) // page_size
        if self.tokens[: most * page_size] == tokens[start : start + most * page_size]:
            return most * page_size
        same, differs = 1, most
        while differs - same > 1:
            half = (same + differs) // 2
            part = slice(same * page_size, half * page_size)
            if self.tokens[part] == tokens[start + part.start : start + part.stop]:
                same = half
            else:
                differs = half
        return same * page_size

    def split(self, num_tokens: int, page_size: int) -> PrefixNode:
        """Cut the run in two and return the new node of the first `num_tokens`.

        This node stays the end of the prefix for those that hold it.
        """
        if self.parent is None:
            raise ValueError("a root has no tokens to split")
        head = PrefixNode(
            parent=self.parent,
            tokens=self.tokens[:num_tokens],
            slots=self.slots[:num_tokens],
            used=self.used,
            locks=self.locks,
            has_window=self.has_window,
            window_locks=self.window_locks,
        )
        self.parent.children[head.tokens[:page_size]] = head
        self.tokens = self.tokens[num_tokens:]
        self.slots = self.slots[num_tokens:]
        head.children[self.tokens[:page_size]] = self
        self.parent = head
        return head

    def detach(self, page_size: int) -> PrefixNode:
        """Take the node out of the tree and return its parent."""
        parent = self.parent
        if parent is None:
            raise ValueError("a root cannot be detached")
        del parent.children[self.tokens[:page_size]]
        self.parent = None
        return parent
