"""The next step: admission, chunks of prompts, and retraction when memory runs out."""

from __future__ import annotations

import sys
from bisect import insort
from collections.abc import Iterable, Sequence

from attnmux.core import InvalidInput
from attnmux.transformers.engine.prefix import PrefixCache
from attnmux.transformers.engine.request import LiveRequest, Plan
from attnmux.transformers.requests.prefixes import PrefixMatch
from attnmux.transformers.run.stats import EngineStats

GROWTH = 64
"""Tokens that each running request may still grow by, reserved before another is admitted. Without
them, the request that was admitted would be retracted a few steps later."""

WORTH_WAITING = 32
"""A request waits for a prompt that is running if it shares at least this many of its tokens, in
whole pages. Running fewer tokens twice is faster than waiting."""


class Scheduler:
    """Keeps the requests that wait, those whose prompts run, and those that decode.

    Requests are admitted in order of arrival, except that one waits while another runs a prefix
    that both share. If the pool cannot hold the next step, cached prefixes are evicted. If that is
    not enough, the request that arrived last gives its memory back and waits again. No request is
    then admitted until a running one ends, so that the oldest request always makes progress.
    """

    def __init__(
        self,
        cache: PrefixCache,
        stats: EngineStats,
        *,
        max_running: int | None,
        prefill_tokens: int,
        deterministic: bool = False,
    ) -> None:
        """max_running, prefill_tokens: as in `Engine`. deterministic: run each request as if
        it were alone. Raises InvalidInput for numbers below 1."""
        steps = cache.steps
        # A step runs at least one token of every decoding request.
        limits = [steps.req_to_token_pool.size, max_running]
        InvalidInput.check_at_least(1, "prefill_tokens", prefill_tokens)
        if max_running is not None:
            InvalidInput.check_at_least(1, "max_running", max_running)
        self.stats = stats
        self.waiting: list[LiveRequest] = []
        self.prefilling: list[LiveRequest] = []
        self.decoding: list[LiveRequest] = []
        self._cache = cache
        self._page_size = cache.page_size
        self._max_running = min(limit for limit in limits if limit is not None)
        self.prefill_tokens = prefill_tokens
        self._deterministic = deterministic
        self._ran_prompts = False
        """Whether the last step did, so that the next one decodes."""
        self._closed = False
        """Whether memory ran out: no request is admitted until one has ended."""

    def add(self, request: LiveRequest) -> None:
        self.waiting.append(request)

    def started(self, requests: Sequence[LiveRequest]) -> None:
        """Move requests whose prompts have run, and that have a next token, to decoding."""
        for request in requests:
            self.prefilling.remove(request)
            self.decoding.append(request)

    def drop_ended(self) -> None:
        """Forget the requests that have ended. Others may be admitted again."""
        self.waiting = [request for request in self.waiting if not request.ended]
        self.prefilling = [request for request in self.prefilling if not request.ended]
        self.decoding = [request for request in self.decoding if not request.ended]
        self._closed = False

    def restart(self, requests: Iterable[LiveRequest]) -> None:
        """Queue all requests again, in order of arrival, with nothing in memory."""
        self.waiting, self.prefilling, self.decoding = list(requests), [], []
        self._closed = False

    @property
    def num_requests(self) -> int:
        return len(self.waiting) + len(self.prefilling) + len(self.decoding)

    def plan(self) -> Plan | None:
        """The next step, for which the pools have room; None if nothing can run."""
        self._cache.slide(self.prefilling + self.decoding)
        while not self._make_room(chunks := self._chunks()):
            if len(self.prefilling) + len(self.decoding) < 2:
                return None
            self._retract()
        if self.waiting:
            self._admit(chunks)
        if not chunks and not self.decoding:
            return None
        decoding = list(self.decoding)
        if self._deterministic and chunks and decoding:
            # Prompts have other kernels than decoding requests, so that they take turns
            self._ran_prompts = not self._ran_prompts
            chunks, decoding = (chunks, []) if self._ran_prompts else ([], decoding)
        chunks.sort(key=lambda chunk: chunk[1] < chunk[0].state.num_pending)
        through = [request for request, count in chunks if count == request.state.num_pending]
        return Plan(decoding=decoding, chunks=chunks, sampled=decoding + through)

    def repeats(self, plan: Plan) -> bool:
        """Whether the requests of `plan`, which is running, decode in the next step too, whatever
        their tokens are. They then have room for it."""
        if plan.chunks or self.prefilling or (self.waiting and self._admits):
            return False
        if any(request.ended or request.num_remaining < 2 for request in plan.decoding):
            return False
        self._cache.slide(plan.decoding)
        return len(plan.decoding) * self._page_size <= self._cache.allocator.available_size()

    def _chunks(self) -> list[tuple[LiveRequest, int]]:
        """The next parts of the prompts that have begun, up to the limits of a step. The window
        pool must hold a whole part, so that a long prompt may run in smaller ones."""
        chunks: list[tuple[LiveRequest, int]] = []
        room = self.prefill_tokens
        for request in self.prefilling:
            if room == 0:
                break
            # A page at least: where not even that is free, a request is retracted.
            pages = max(self._window_pages(chunks), not chunks)
            count = self._next_tokens(request, room, pages)
            if not count:
                break
            chunks.append((request, count))
            room -= count
        return chunks

    def _window_pages(self, chunks: list[tuple[LiveRequest, int]]) -> int:
        """Pages of the window pool that a step with these chunks leaves; without limit if there is
        no window pool."""
        if not self._cache.window_need:
            return sys.maxsize
        used = sum(request.state.num_columns % self._page_size == 0 for request in self.decoding)
        used += sum(self._new_pages(running, count) for running, count in chunks)
        return self._cache.window_obtainable // self._page_size - used

    def _next_tokens(self, request: LiveRequest, room: int, pages: int) -> int:
        """Its pending tokens up to `room` that open at most so many pages. 0 if the next of them
        see each other, and are more."""
        state = request.state
        if self._deterministic:
            # The parts that it would have alone, each of them whole
            part = self.prefill_tokens - state.num_cached % self.prefill_tokens
            part = min(part, state.num_pending)
            return part if part <= room else 0
        in_page = -state.num_columns % self._page_size
        count = min(state.num_pending, room, in_page + pages * self._page_size)
        if request.stop > state.num_cached:
            count = min(count, request.stop - state.num_cached)
        if state.images is None:
            return count
        start = state.num_cached
        return state.images.chunk_end(start, start + count) - start

    def _make_room(self, chunks: list[tuple[LiveRequest, int]]) -> bool:
        """Evict as much as the step needs. Returns whether that was enough."""
        page_size, free = self._page_size, self._cache.allocator.available_size
        need = sum(self._new_pages(running, count) for running, count in chunks) * page_size
        if need + len(self.decoding) * page_size <= free():
            return True
        self._cache.give_back(self.decoding)
        need += page_size * sum(
            request.state.num_columns % page_size == 0 for request in self.decoding
        )
        self.stats.evicted_tokens += self._cache.make_room(need)
        return need <= free()

    def _new_pages(self, request: LiveRequest, num_new: int) -> int:
        """New pages for its next `num_new` tokens, and before the first step for its encoder's."""
        state = request.state
        return self._pages(state.num_columns, state.columns_for(num_new))

    def _pages(self, start: int, count: int) -> int:
        """New pages for `count` slots after the first `start`."""
        return -(-(start + count) // self._page_size) - -(-start // self._page_size)

    def _retract(self) -> None:
        """Free the memory of the request that arrived last. It runs again later."""
        request = max(self.prefilling + self.decoding, key=lambda one: one.id)
        (self.prefilling if request in self.prefilling else self.decoding).remove(request)
        self._cache.release([request])
        insort(self.waiting, request, key=lambda one: one.id)
        self._closed = True
        self.stats.retractions += 1

    @property
    def _admits(self) -> bool:
        """Whether a request may be admitted, as far as rows and earlier retractions allow."""
        running = len(self.prefilling) + len(self.decoding)
        return running < self._max_running and not (self._closed and running)

    def _admit(self, chunks: list[tuple[LiveRequest, int]]) -> None:
        """Admit waiting requests while rows, the step's tokens and memory suffice."""
        room = self.prefill_tokens - sum(count for _, count in chunks)
        rows = self._max_running - len(self.prefilling) - len(self.decoding)
        if not self._admits:
            return
        for request in self.waiting[: self._max_running]:
            if not room or not rows:
                break
            match = self._cache.match(request)
            if self._worth_waiting(request, match):
                continue
            self._cache.lock(match)
            pages = self._window_pages(chunks)
            fits = self._fits(request, match)
            if not fits and self._cache.give_back(self.decoding):
                fits = self._fits(request, match)
            if not fits or pages < 1:
                self._cache.unlock(match)
                self._closed = not fits
                break
            self._let_in(request, match)
            count = self._next_tokens(request, room, pages)
            if count:
                chunks.append((request, count))
            room, rows = room - count, rows - 1
        # It fits: each request was admitted only if the needs of all others left room for it.
        self._make_room(chunks)

    def _worth_waiting(self, request: LiveRequest, match: PrefixMatch) -> bool:
        """Whether a prompt that is running shares more of this prompt than the cache holds, or is
        about to leave states in it where this one could begin."""
        if not self._cache.shares(request):
            return False
        worth = -(-WORTH_WAITING // self._page_size) * self._page_size
        ids = request.state.keys

        def helps(other: LiveRequest) -> bool:
            end = match.known + worth
            if other.state.num_cached < other.stop >= match.slots.shape[0] + worth:
                end = other.stop
            return len(ids) > end and other.state.keys[:end] == ids[:end]

        return any(helps(other) and self._cache.shares(other) for other in self.prefilling)

    def _fits(self, request: LiveRequest, match: PrefixMatch) -> bool:
        """Whether memory suffices for its whole prompt and the needs of the running requests."""
        need = self._new_pages(request, request.state.num_pending)
        need -= match.slots.shape[0] // self._page_size
        for other in self.prefilling:
            need += self._new_pages(other, other.state.num_pending)
        for other in self.prefilling + self.decoding:
            need += self._pages(0, min(other.num_remaining, self._growth))
        if self._deterministic:
            need += self._pages(0, request.num_remaining)
        return need * self._page_size <= self._cache.full_obtainable and self._window_fits(
            request, match
        )

    @property
    def _growth(self) -> int:
        """Tokens that a running request may still grow by. A deterministic one is never retracted:
        it would run its own tokens again as a prompt."""
        return sys.maxsize if self._deterministic else GROWTH

    def _window_fits(self, request: LiveRequest, match: PrefixMatch) -> bool:
        """`_fits` for the window pool. A request needs no more of it than its windows."""
        most = self._cache.window_need // self._page_size
        if not most:
            return True
        pending = self._new_pages(request, request.state.num_pending)
        need = min(pending - match.slots.shape[0] // self._page_size, most)
        for other in self.prefilling:
            need += min(self._new_pages(other, other.state.num_pending), most)
        for other in self.prefilling + self.decoding:
            need += min(self._pages(0, min(other.num_remaining, GROWTH)), most)
        return need * self._page_size <= self._cache.window_obtainable

    def _let_in(self, request: LiveRequest, match: PrefixMatch) -> None:
        self._cache.admit(request, match)
        self.waiting.remove(request)
        self.prefilling.append(request)
        if request.reused_tokens is None:
            request.reused_tokens = match.slots.shape[0]
            self.stats.prompt_tokens += request.prompt_len
            self.stats.reused_tokens += request.reused_tokens
