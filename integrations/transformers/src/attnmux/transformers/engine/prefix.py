"""Shared prefixes, and the memory of running requests and of the cache."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from attnmux.transformers.engine.request import LiveRequest
from attnmux.transformers.requests.batching import StepBuilder
from attnmux.transformers.requests.prefixes import PrefixMatch

EVICTED_SHARE = 32
"""Evictions of windows free at least this part of the window pool, since each reads the whole
tree."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryUse:
    """The owners of a KV pool's tokens, in whole pages. The three add up to the pool."""

    free: int
    cached: int
    """Owned by the prefix tree, whether or not a request reads them."""
    held: int
    """Owned by single requests."""


class PrefixCache:
    """Gives requests the cached prefixes of their prompts, and keeps the pages that they filled.

    The tree belongs to the runner and owns whole pages. A request owns its slots from `num_shared`
    on. Its node is locked while it runs, so that no page that it reads is evicted.
    """

    def __init__(self, steps: StepBuilder, *, enabled: bool) -> None:
        self._states = steps.state_tree
        # Without kept states, those of the last token are all: no prefix could be run on from
        self.enabled = enabled and (steps.linear_states is None or self._states is not None)
        self.steps = steps
        self.allocator = steps.allocator
        self.page_size = steps.allocator.page_size
        self._tree = steps.prefix_tree
        self._window_tree = steps.window_tree

    def shares(self, request: LiveRequest) -> bool:
        """Whether it may share a prefix. Tokens after an encoder's are never shared."""
        return self.enabled and not request.state.encoder_len

    def match(self, request: LiveRequest) -> PrefixMatch:
        """The longest cached prefix that leaves at least one token to run."""
        return self._tree.match(request.state.keys[:-1] if self.shares(request) else [])

    def lock(self, match: PrefixMatch) -> None:
        self._tree.lock(match.node)
        if self._window_tree is not None:
            self._window_tree.lock_windows(match.node)

    def unlock(self, match: PrefixMatch) -> None:
        if self._window_tree is not None:
            self._window_tree.unlock_windows(match.node)
        self._tree.unlock(match.node)

    def admit(self, request: LiveRequest, match: PrefixMatch) -> None:
        """Give the request a row, the matched slots and the states after them. It takes over the
        lock of `match`."""
        state = request.state
        self.steps.adopt(state, match.slots)
        request.node = match.node
        if self._states is not None:
            assert state.row is not None
            self._states.restore(match.node, state.row)
            request.stop = match.known
        request.reads_shared_window = True

    def slide(self, requests: Sequence[LiveRequest]) -> None:
        """Free the window pages that the requests' tokens fell out of, or let others evict them."""
        if self._window_tree is None:
            return
        self.steps.slide([request.state for request in requests])
        for request in requests:
            state = request.state
            behind = self._window_tree.span.kept_from(state.num_cached, self.page_size)
            if behind >= state.num_shared:
                self._unlock_windows(request)

    def _unlock_windows(self, request: LiveRequest) -> None:
        if self._window_tree is not None and request.reads_shared_window:
            assert request.node is not None
            self._window_tree.unlock_windows(request.node)
            request.reads_shared_window = False

    def store(self, request: LiveRequest) -> None:
        """Give the request's whole pages to the tree, where others find them, with the states
        after them if they are its last.

        If the tree has the same tokens already, the request continues with the tree's slots.
        """
        state, before = request.state, request.node
        # A request that was aborted may have run a token that it never took
        known_len = min(state.num_cached, len(state.token_ids))
        whole = known_len // self.page_size * self.page_size
        if not self.shares(request) or before is None or whole <= state.num_shared:
            return
        ids = state.keys[:whole]
        slots = self.steps.slots(state, 0, whole)
        if self._window_tree is None:
            known = self._tree.insert(ids, slots)
        else:
            windows_from = max(state.num_behind, state.num_shared)
            known = self._window_tree.insert(ids, slots, windows_from=windows_from)
        match = self._tree.find(ids)
        self.lock(match)
        self._unlock_windows(request)
        self._tree.unlock(before)
        request.node, request.reads_shared_window = match.node, True
        if known > state.num_shared:
            twice = slots[state.num_shared : known : self.page_size]
            self.allocator.free_pages(twice // self.page_size)
            self.steps.rewrite(state, state.num_shared, match.slots[state.num_shared :])
        state.num_shared = whole
        if self._states is not None and whole == state.num_cached:
            assert state.row is not None
            self._states.keep(match.node, state.row)

    def release(self, requests: Sequence[LiveRequest]) -> None:
        """Free the rows and slots of requests, and keep for others the whole pages of those that
        are sound. Requests that hold nothing are skipped."""
        held = [owner for owner in requests if owner.node is not None]
        for request in held:
            if request.is_sound:
                self.store(request)
        for is_sound in (True, False):
            states = [released.state for released in held if released.is_sound == is_sound]
            self.steps.release(states, zero=not is_sound)
        for request in held:
            assert request.node is not None
            self._unlock_windows(request)
            self._tree.unlock(request.node)
            request.node = None

    def give_back(self, requests: Sequence[LiveRequest]) -> bool:
        """See `StepBuilder.give_back`."""
        return self.steps.give_back([request.state for request in requests])

    @property
    def obtainable(self) -> int:
        """Tokens that are free, or that eviction would free, in all pools."""
        return min(self.full_obtainable, self.window_obtainable)

    @property
    def full_obtainable(self) -> int:
        """Tokens that are free, or that eviction would free, whatever their windows take."""
        return self.allocator.full_available_size() + self._tree.evictable_tokens

    @property
    def window_obtainable(self) -> int:
        """Tokens of the window pool that are free, or that eviction would free; without limit if
        there is none."""
        tree = self._window_tree
        if tree is None:
            return sys.maxsize
        return tree.swa_allocator.swa_available_size() + tree.evictable_window_tokens

    @property
    def window_need(self) -> int:
        """Tokens of the window pool with which a request can always run on; 0 without one."""
        tree = self._window_tree
        if tree is None:
            return 0
        return tree.span.tokens_each(self.page_size)

    def make_room(self, num_tokens: int) -> int:
        """Evict until `num_tokens` are free in all pools. Returns how many tokens it evicted;
        those that lost only their windows do not count."""
        missing = num_tokens - self.allocator.full_available_size()
        evicted = self._tree.evict(missing) if missing > 0 else 0
        tree = self._window_tree
        if tree is not None:
            missing = num_tokens - tree.swa_allocator.swa_available_size()
            if missing > 0:
                tree.evict_windows(max(missing, tree.swa_allocator.pool.swa.size // EVICTED_SHARE))
        return evicted

    def clear(self) -> None:
        """Evict every prefix that no request reads."""
        self._tree.evict(self._tree.evictable_tokens)

    @property
    def memory(self) -> MemoryUse:
        free = self.allocator.full_available_size()
        cached = self._tree.evictable_tokens + self._tree.protected_tokens
        return MemoryUse(free=free, cached=cached, held=self.allocator.size - free - cached)

    @property
    def window_memory(self) -> MemoryUse | None:
        """The owners of the window pool's pages; None without one."""
        tree = self._window_tree
        if tree is None:
            return None
        free, cached = tree.swa_allocator.swa_available_size(), tree.window_tokens
        held = tree.swa_allocator.pool.swa.size - free - cached
        return MemoryUse(free=free, cached=cached, held=held)
