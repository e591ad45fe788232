"""Prefixes of models with window layers: each is reused only if its windows are still there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from attnmux.core import SWAKVPool
from attnmux.parts import LinearStatePool
from attnmux.transformers.requests.prefixes.node import PrefixNode, whole_pages
from attnmux.transformers.requests.prefixes.state_tree import StatePrefixTree
from attnmux.transformers.requests.prefixes.tree import PrefixTree
from attnmux.transformers.requests.slots import SWAAllocator


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowSpan:
    """The earlier keys that the window layers of a model need."""

    sliding_window_size: int = -1
    """The widest window; -1 without any."""
    attention_chunk_sizes: tuple[int, ...] = ()

    @property
    def most_tokens(self) -> int:
        """The most earlier tokens that a token needs."""
        return max(self.sliding_window_size, *(size - 1 for size in self.attention_chunk_sizes), 0)

    def slide_tokens(self, page_size: int) -> int:
        """Tokens, in whole pages, that fall out of a request's windows before it frees them: an
        eighth of the window, so that few steps free any."""
        return max(self.most_tokens // 8 // page_size, 1) * page_size

    def tokens_each(self, page_size: int) -> int:
        """Tokens of the window pool, in whole pages, with which a request can always run on: the
        window, what it frees at a time, and the pages at both ends."""
        pages = -(-self.most_tokens // page_size) + 3
        return pages * page_size + 2 * self.slide_tokens(page_size)

    def kept_from(self, num_tokens: int, page_size: int) -> int:
        """Leading tokens, in whole pages, that no token after the first `num_tokens` needs.

        Counted from the end of the last whole page, so that these pages stay a prefix that others
        can continue.
        """
        whole = num_tokens // page_size * page_size
        firsts = [whole // size * size for size in self.attention_chunk_sizes]
        if self.sliding_window_size >= 0:
            firsts.append(
                SWAKVPool.tokens_behind_window(whole, self.sliding_window_size, page_size)
            )
        return min(firsts, default=0) // page_size * page_size


class WindowPrefixTree(PrefixTree):
    """A prefix tree over a `SWAAllocator`. Its pages may outlive their window pages.

    A prefix can be continued if the window pages that its next token needs are there. `match`
    returns the longest such prefix. A reader locks the match's node twice: `lock` keeps the
    prefix, and `lock_windows` the windows at its end. It unlocks the windows once it has moved on,
    and the prefix when it ends. `evict_windows` frees window pages that are not locked.
    """

    def __init__(self, allocator: SWAAllocator, span: WindowSpan) -> None:
        super().__init__(allocator)
        self.swa_allocator = allocator
        self.span = span

    @property
    def window_tokens(self) -> int:
        """Tokens whose window pages the tree owns."""
        return self._in_window

    @property
    def evictable_window_tokens(self) -> int:
        """Tokens whose window pages `evict_windows` can free."""
        return self._in_window - self._locked_window

    def _continues(self, node: PrefixNode) -> bool:
        return self._run_start(node) <= self._first_needed(node)

    def insert(
        self,
        token_ids: Sequence[int],
        slots: torch.Tensor,
        *,
        windows_from: int = 0,
    ) -> int:
        """Like `PrefixTree.insert`. The tokens from `windows_from` on, whole pages, have window
        pages, and the caller owns their slots.

        Cached pages without a window take over that of the caller's, whose slots it then frees.
        """
        tokens = whole_pages(token_ids, self.page_size)
        self._check_slots(slots, len(tokens))
        if tokens and self.allocator.debug:
            self.swa_allocator.check_owned(slots[: len(tokens)], windows_from=windows_from)
        node = self._walk(tokens)
        there = node.end
        self._restore(node, slots, windows_from)
        for stop, has_window in ((min(windows_from, len(tokens)), False), (len(tokens), True)):
            if node.end < stop:
                node = self._append(node, tokens[node.end : stop], slots[node.end : stop])
                node.has_window = has_window
                self._in_window += len(node.tokens) * has_window
        return there

    def lock_windows(self, node: PrefixNode) -> None:
        """Keep the windows that a request needs to continue a locked prefix that ends in `node`."""
        for step in self._window(node):
            if step.window_locks == 0 and step.has_window:
                self._locked_window += len(step.tokens)
            step.window_locks += 1

    def unlock_windows(self, node: PrefixNode) -> None:
        """Release one lock of `lock_windows`."""
        for step in self._window(node):
            step.window_locks -= 1
            if step.window_locks == 0 and step.has_window:
                self._locked_window -= len(step.tokens)

    def evict_windows(self, num_tokens: int) -> int:
        """Free the window pages of `num_tokens`, in whole pages. Returns how many tokens it freed,
        fewer if the rest is locked.

        Windows at the places where cached prefixes end or part go last: requests are likely to
        continue there. Of equal ones, the least recently used go first.
        """
        wanted = left = -(-num_tokens // self.page_size) * self.page_size
        freed: list[torch.Tensor] = []
        nodes = sorted(self._evictable(), key=lambda pair: pair[0].used)
        for keeps_ends in (True, False):
            for node, first_needed in nodes:
                count = min(len(node.tokens), left)
                if keeps_ends:
                    count = min(count, first_needed - node.start)
                if count > 0 and node.has_window:
                    part = node
                    if count < len(node.tokens):
                        part = node.split(count, self.page_size)
                    part.has_window = False
                    self._in_window -= count
                    left -= count
                    freed.append(part.slots)
        if freed:
            self.swa_allocator.free_swa(torch.cat(freed))
        return wanted - left

    def reset(self) -> None:
        super().reset()
        self._in_window = 0
        self._locked_window = 0

    def _remove(self, leaf: PrefixNode) -> None:
        self._in_window -= len(leaf.tokens) * leaf.has_window
        super()._remove(leaf)

    def _first_needed(self, node: PrefixNode) -> int:
        """The first token whose window page is needed to continue the prefix."""
        return self.span.kept_from(node.end, self.page_size)

    def _run_start(self, node: PrefixNode) -> int:
        """The start of the tokens with window pages that end with the node."""
        start = node.end
        for step in node.path():
            if not step.has_window:
                break
            start = step.start
        return start

    def _window(self, node: PrefixNode) -> Iterator[PrefixNode]:
        """The nodes of the windows at a prefix's end, the first of them cut where these begin."""
        first = self._first_needed(node)
        for step in node.path():
            if step.end <= first:
                return
            if step.start < first:
                step.split(first - step.start, self.page_size)
            yield step

    def _restore(self, node: PrefixNode, slots: torch.Tensor, windows_from: int) -> None:
        """Give cached pages without windows those of the caller's slots."""
        for step in node.path():
            if step.end <= windows_from:
                return
            if step.has_window:
                continue
            if step.start < windows_from:
                step.split(windows_from - step.start, self.page_size)
            self.swa_allocator.move_windows(slots[step.start : step.end], step.slots)
            step.has_window = True
            self._in_window += len(step.tokens)
            if step.window_locks:
                self._locked_window += len(step.tokens)

    def _evictable(self) -> Iterator[tuple[PrefixNode, int]]:
        """The nodes whose windows may be freed. With each, the first token whose window is needed
        where the cached prefixes through the node end or part next."""
        heads = [*self._root.children.values()]
        while heads:
            run = [heads.pop()]
            while not self._may_end(run[-1]):
                run += run[-1].children.values()
            heads += run[-1].children.values()
            first_needed = self._first_needed(run[-1])
            for node in run:
                if node.has_window and not node.window_locks:
                    yield node, first_needed

    def _may_end(self, node: PrefixNode) -> bool:
        """Whether requests are likely to continue the prefix that ends in `node`."""
        return len(node.children) != 1


class WindowStatePrefixTree(StatePrefixTree, WindowPrefixTree):
    """A prefix tree whose prefixes are continued where their states were kept and the windows at
    their ends are still there."""

    def __init__(self, allocator: SWAAllocator, span: WindowSpan, states: LinearStatePool) -> None:
        self.states = states
        WindowPrefixTree.__init__(self, allocator, span)

    def _may_end(self, node: PrefixNode) -> bool:
        return node in self._kept or super()._may_end(node)
