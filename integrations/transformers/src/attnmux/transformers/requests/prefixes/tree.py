"""Prefixes whose K and V are in the pool: a radix tree over token ids, page by page."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from attnmux.core import InvalidInput
from attnmux.transformers.requests.prefixes.node import PrefixNode, whole_pages
from attnmux.transformers.requests.slots import PagedAllocator


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PrefixMatch:
    """The longest cached prefix of some tokens."""

    slots: torch.Tensor
    """[n] int64 on the allocator's device, n whole pages."""
    node: PrefixNode = field(repr=False)
    """Lock it while the slots are read."""
    known: int
    """Tokens whose K and V are cached, whole pages: more than n if the model's windows or states
    at their end are not."""


class PrefixTree:
    """Prefixes of finished requests, in whole pages, for later requests to share.

    The tree owns the slots that were inserted, and evicts the least recently used ones back to the
    allocator. A reader of matched slots locks the match's node before the next `evict` and unlocks
    it afterwards; locked prefixes are never evicted.

        match = tree.match(tokens)            a request begins:
        tree.lock(match.node)                 it reads match.slots and allocates the rest
        there = tree.insert(tokens, slots)    it ends: slots of all its tokens
        allocator.free(slots[len(match.slots):there])     another request cached these meanwhile
        allocator.free(slots[len(tokens) - len(tokens) % page_size :])   not a whole page
        tree.unlock(match.node)

    Matching and inserting cost O(tokens) and do not synchronise with the device.
    Pages whose window page a `SWAAllocator` has freed cannot be shared here: a request that freed
    some inserts nothing. With a `SWAAllocator` each insertion checks this, which synchronises. A
    `WindowPrefixTree` takes them.
    """

    def __init__(self, allocator: PagedAllocator) -> None:
        """Share a page of the allocator at a time."""
        self.allocator = allocator
        self.page_size = allocator.page_size
        self._no_slots = torch.empty(0, dtype=torch.int64, device=allocator.device)
        self.reset()

    @property
    def evictable_tokens(self) -> int:
        """Tokens that `evict` can free."""
        return self._cached - self._protected

    @property
    def protected_tokens(self) -> int:
        """Tokens in locked prefixes."""
        return self._protected

    def match(self, token_ids: Sequence[int]) -> PrefixMatch:
        """The longest cached prefix of whole pages that a request can continue.

        All of token_ids may match; pass one token less to have one left to run.
        Raises InvalidInput for a tensor of token ids, as `insert` does.
        """
        node = self._walk(whole_pages(token_ids, self.page_size))
        known = node.end
        while not node.is_root and not self._continues(node):
            assert node.parent is not None
            node = node.parent
        return self._match(node, known)

    def _continues(self, node: PrefixNode) -> bool:
        """Whether a request can continue the prefix that ends in `node`."""
        return True

    def find(self, token_ids: Sequence[int]) -> PrefixMatch:
        """The longest cached prefix of whole pages, which becomes the most recently used one,
        whether or not a request can continue it. Raises InvalidInput as `match` does."""
        node = self._walk(whole_pages(token_ids, self.page_size))
        return self._match(node, node.end)

    def _match(self, node: PrefixNode, known: int) -> PrefixMatch:
        parts = [step.slots for step in node.path()]
        slots = torch.cat(parts[::-1]) if parts else self._no_slots
        return PrefixMatch(slots=slots, node=node, known=known)

    def insert(self, token_ids: Sequence[int], slots: torch.Tensor) -> int:
        """Give the tree the slots [at least all whole pages] int64 of token_ids.

        Returns the number of tokens that were already cached, a multiple of the page size. The tree
        takes the slots from there to the last whole page. The caller keeps the others, and frees
        its own among those before.
        Raises InvalidInput, changing nothing, for slots that do not fit the tokens.
        """
        tokens = whole_pages(token_ids, self.page_size)
        self._check_slots(slots, len(tokens))
        if tokens:
            self.allocator.check_owned(slots[: len(tokens)])
        node = self._walk(tokens)
        there = node.end
        if there < len(tokens):
            self._append(node, tokens[there:], slots[there : len(tokens)])
        return there

    def _append(self, node: PrefixNode, tokens: tuple[int, ...], slots: torch.Tensor) -> PrefixNode:
        """A new leaf below `node`."""
        # A copy, since the caller's tensor may be a view of a row that is reused
        leaf = PrefixNode(parent=node, tokens=tokens, slots=slots.clone(), used=self._clock)
        node.children[leaf.tokens[: self.page_size]] = leaf
        self._cached += len(leaf.tokens)
        self._offer(leaf)
        return leaf

    def lock(self, node: PrefixNode) -> None:
        """Keep the prefix that ends in `node`, until it is unlocked as many times.

        Raises InvalidInput for a node that was evicted.
        """
        self._check_alive(node)
        for step in node.path():
            if step.locks == 0:
                self._protected += len(step.tokens)
            step.locks += 1

    def unlock(self, node: PrefixNode) -> None:
        """Release one lock. Raises InvalidInput for a node that is not locked."""
        self._check_alive(node)
        if not node.is_root and node.locks == 0:
            raise InvalidInput("node", got="a prefix without a lock", expected="a locked one")
        for step in node.path():
            step.locks -= 1
            if step.locks == 0:
                self._protected -= len(step.tokens)
                self._offer(step)

    def evict(self, num_tokens: int) -> int:
        """Free `num_tokens`, in whole pages, from the ends of the least recently used prefixes.

        Returns the number of freed tokens, fewer if the rest is locked.
        """
        if num_tokens < 0:
            raise InvalidInput("num_tokens", got=num_tokens, expected="at least 0")
        wanted = -(-num_tokens // self.page_size) * self.page_size
        freed: list[torch.Tensor] = []
        num_freed = 0
        while num_freed < wanted and (leaf := self._oldest_leaf()) is not None:
            excess = len(leaf.tokens) - (wanted - num_freed)
            if excess > 0:
                leaf.split(excess, self.page_size)
            num_freed += len(leaf.tokens)
            freed.append(leaf.slots)
            self._remove(leaf)
        if freed:
            self.allocator.free_pages(torch.cat(freed)[:: self.page_size] // self.page_size)
        return num_freed

    def reset(self) -> None:
        """Forget every prefix, locked or not, without freeing its slots.

        For use together with `allocator.clear()`.
        """
        self._root = PrefixNode.root()
        self._cached = 0
        self._protected = 0
        self._clock = 0
        # A heap with every unlocked leaf once, by its use when it was offered
        self._leaves: list[tuple[int, int, PrefixNode]] = []
        self._num_offers = 0

    def _walk(self, tokens: tuple[int, ...]) -> PrefixNode:
        """The node where the cached prefix of the tokens ends; its path becomes the latest."""
        self._clock += 1
        node, place = self._root, 0
        while place < len(tokens):
            child = node.children.get(tokens[place : place + self.page_size])
            if child is None:
                break
            common = child.common(tokens, place, self.page_size)
            if common < len(child.tokens):
                child = child.split(common, self.page_size)
            child.used = self._clock
            node, place = child, place + common
        return node

    def _oldest_leaf(self) -> PrefixNode | None:
        """Take the least recently used leaf without a lock out of the heap."""
        while self._leaves:
            used, _, node = heapq.heappop(self._leaves)
            node.is_offered = False
            if node.locks or node.children or not node.is_alive:
                continue
            if node.used == used:
                return node
            self._offer(node)
        return None

    def _offer(self, node: PrefixNode) -> None:
        """Put a node into the heap of leaves if it can be evicted."""
        if node.is_root or node.locks or node.children or node.is_offered:
            return
        node.is_offered = True
        self._num_offers += 1
        heapq.heappush(self._leaves, (node.used, self._num_offers, node))

    def _remove(self, leaf: PrefixNode) -> None:
        parent = leaf.detach(self.page_size)
        self._cached -= len(leaf.tokens)
        self._offer(parent)

    def _check_alive(self, node: PrefixNode) -> None:
        if not node.is_alive:
            expected = "that of the latest match"
            raise InvalidInput("node", got="an evicted prefix", expected=expected)

    def _check_slots(self, slots: torch.Tensor, num_tokens: int) -> None:
        device = self.allocator.device
        is_vector = slots.dtype == torch.int64 and slots.dim() == 1 and len(slots) >= num_tokens
        if not is_vector or slots.device.type != device.type:
            raise InvalidInput(
                "slots",
                got=f"{slots.dtype} of shape {tuple(slots.shape)} on {slots.device}",
                expected=f"int64 of shape [{num_tokens}], or more, on {device}",
            )
        if num_tokens and self.allocator.debug:
            self._check_pages(slots[:num_tokens])

    def _check_pages(self, slots: torch.Tensor) -> None:
        """Require whole pages of the allocator with their slots in order. Synchronises."""
        pages = slots.view(-1, self.page_size)
        in_order = pages[:, :1] + torch.arange(pages.shape[1], device=slots.device)
        broken = (pages != in_order).any(1) | (pages[:, 0] % self.page_size != 0)
        if bool(broken.any()):
            raise InvalidInput(
                "slots",
                got=f"{pages[broken][0].tolist()}",
                expected=f"whole pages of {self.page_size} slots in order",
            )
