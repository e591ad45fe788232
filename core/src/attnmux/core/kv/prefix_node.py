"""A node of the prefix tree: a run of whole pages behind its parent's."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

import torch

from attnmux.core.errors import InvalidInput

Page = tuple[int, ...]
"""The token ids of one page."""


def whole_pages(token_ids: Sequence[int], page_size: int) -> tuple[int, ...]:
    """The token ids that fill whole pages.

    Raises InvalidInput for a tensor, whose elements equal no others as keys: nothing would be
    found again.
    """
    if isinstance(token_ids, torch.Tensor):
        raise InvalidInput(
            "token_ids", came="a tensor", expected="a sequence of ints: token_ids.tolist()"
        )
    return tuple(token_ids[: len(token_ids) - len(token_ids) % page_size])


class PrefixNode:
    """A run of pages, all used at the same time, locked by the same requests."""

    __slots__ = (
        "children",
        "end",
        "is_offered",
        "is_root",
        "locks",
        "namespace",
        "parent",
        "slots",
        "tokens",
        "used",
    )

    def __init__(
        self,
        *,
        parent: PrefixNode | None,
        tokens: tuple[int, ...],
        slots: torch.Tensor,
        used: int,
        namespace: Hashable = None,
    ) -> None:
        self.parent = parent
        """None in a root, and in a node that was evicted."""
        self.is_root = parent is None
        self.namespace = namespace
        """Of a root."""
        self.children: dict[Page, PrefixNode] = {}
        """By the first page of each."""
        self.tokens = tokens
        self.slots = slots
        self.end: int = len(tokens) + (0 if parent is None else parent.end)
        """Tokens of the prefix that ends here."""
        self.used = used
        """When it was last matched or inserted."""
        self.locks = 0
        self.is_offered = False
        """Whether the tree's heap of leaves has an entry for it."""

    @classmethod
    def root(cls, namespace: Hashable) -> PrefixNode:
        """The empty prefix."""
        nothing = torch.empty(0, dtype=torch.int64)
        return cls(parent=None, tokens=(), slots=nothing, used=0, namespace=namespace)

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
        """How many of the node's tokens, in whole pages, are those from tokens[start] on.

        The first page is known to be. Slices are compared whole, and cut in half where they
        differ, which is far faster than token by token.
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

        This node stays the end of the prefix, as those who hold it expect.
        """
        parent = self.parent
        if parent is None:
            raise ValueError("a root has nothing to split")
        head = PrefixNode(
            parent=parent,
            tokens=self.tokens[:num_tokens],
            slots=self.slots[:num_tokens],
            used=self.used,
        )
        head.locks = self.locks
        parent.children[head.tokens[:page_size]] = head
        self.tokens = self.tokens[num_tokens:]
        self.slots = self.slots[num_tokens:]
        head.children[self.tokens[:page_size]] = self
        self.parent = head
        return head

    def detach(self, page_size: int) -> PrefixNode:
        """Take the node out of the tree and return its parent."""
        parent = self.parent
        if parent is None:
            raise ValueError("a root cannot be taken out")
        del parent.children[self.tokens[:page_size]]
        self.parent = None
        return parent
