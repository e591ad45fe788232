"""What runs next: admission, chunks of prompts, and retraction when memory runs out."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from attnmux.core import PrefixMatch, check_positive
from attnmux.transformers.engine.prefix import PrefixCache
from attnmux.transformers.engine.request import LiveRequest
from attnmux.transformers.engine.stats import EngineStats, Kind

GROWTH = 64
"""Tokens that each running request is expected to grow by when room for another is sought: room
that is gone a few steps later would only make a retraction of the one that was let in."""

WORTH_WAITING = 32
"""Tokens of a prompt being run that a waiting one has to share (in whole pages) for it to wait
until they are cached; fewer are sooner run again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """One step: every decoding request by a token, and chunks of prompts."""

    decoding: list[LiveRequest]
    chunks: list[tuple[LiveRequest, int]]
    """With how many of its pending tokens each takes part; all of them but for the last request,
    which the step may not have room for."""
    sampled: list[LiveRequest]
    """Those with a next token after the step: its first requests."""

    @property
    def kind(self) -> Kind:
        if not self.chunks:
            return "decode"
        return "mixed" if self.decoding else "extend"

    @property
    def requests(self) -> list[LiveRequest]:
        return self.decoding + [request for request, _ in self.chunks]

    @property
    def num_prompt_tokens(self) -> int:
        return sum(count for _, count in self.chunks)


class Scheduler:
    """Who waits, who has its prompt run, and who decodes.

    Requests are admitted in order of arrival, except that one waits while another runs a prefix
    that both share. When the pool cannot hold the next step, cached prefixes are evicted; when
    that is not enough, the request that arrived last gives its memory back and waits again, and
    nobody is admitted until a running one has ended: so the oldest always gets on.
    """

    def __init__(
        self,
        cache: PrefixCache,
        stats: EngineStats,
        *,
        max_running: int | None,
        prefill_tokens: int,
    ) -> None:
        """max_running, prefill_tokens: as in `Engine`. Raises InvalidInput for those below 1."""
        steps = cache.steps
        # A step runs a token of every decoding request, at least.
        limits = [steps.req_to_token_pool.size, max_running, steps.max_step_tokens]
        for argument, value in (("max_running", max_running), ("prefill_tokens", prefill_tokens)):
            if value is not None:
                check_positive(argument, value)
        self.stats = stats
        self.waiting: list[LiveRequest] = []
        self.prefilling: list[LiveRequest] = []
        self.decoding: list[LiveRequest] = []
        self._cache = cache
        self._page_size = cache.page_size
        self._max_running = min(limit for limit in limits if limit is not None)
        self._prefill_tokens = prefill_tokens
        self._max_step_tokens = steps.max_step_tokens
        self._closed = False
        """Whether memory was too little: nobody is let in until some request has ended."""

    def add(self, request: LiveRequest) -> None:
        self.waiting.append(request)

    def started(self, requests: Sequence[LiveRequest]) -> None:
        """Their prompts have been run, and their next tokens are there."""
        for request in requests:
            self.prefilling.remove(request)
            self.decoding.append(request)

    def drop_ended(self) -> None:
        """Forget the requests that have ended; their room lets others in."""
        self.waiting = [one for one in self.waiting if not one.ended]
        self.prefilling = [one for one in self.prefilling if not one.ended]
        self.decoding = [one for one in self.decoding if not one.ended]
        self._closed = False

    def restart(self, requests: Iterable[LiveRequest]) -> None:
        """Let all of them wait, in order of arrival, with nothing in memory."""
        self.waiting, self.prefilling, self.decoding = list(requests), [], []
        self._closed = False

    @property
    def num_requests(self) -> int:
        return len(self.waiting) + len(self.prefilling) + len(self.decoding)

    def plan(self) -> Plan | None:
        """The next step, with room for it in the pool; None where nothing can run."""
        while not self._make_room(chunks := self._chunks()):
            if len(self.prefilling) + len(self.decoding) < 2:
                return None
            self._retract()
        if self.waiting:
            self._admit(chunks)
        if not chunks and not self.decoding:
            return None
        decoding = list(self.decoding)
        through = [one for one, count in chunks if count == one.state.num_pending]
        return Plan(decoding=decoding, chunks=chunks, sampled=decoding + through)

    def _chunks(self) -> list[tuple[LiveRequest, int]]:
        """The next parts of the prompts that have begun, as many as a step may run."""
        chunks: list[tuple[LiveRequest, int]] = []
        room = self._room()
        for request in self.prefilling:
            if room == 0:
                break
            count = min(request.state.num_pending, room)
            chunks.append((request, count))
            room -= count
        return chunks

    def _room(self) -> int:
        if self._max_step_tokens is None:
            return self._prefill_tokens
        return min(self._prefill_tokens, self._max_step_tokens - len(self.decoding))

    def _make_room(self, chunks: list[tuple[LiveRequest, int]]) -> bool:
        """Evict what the step needs. Returns whether that was enough."""
        page_size, free = self._page_size, self._cache.allocator.available_size
        need = sum(self._new_pages(one, count) for one, count in chunks) * page_size
        if need + len(self.decoding) * page_size <= free():
            return True
        need += page_size * sum(one.state.num_columns % page_size == 0 for one in self.decoding)
        self.stats.evicted_tokens += self._cache.make_room(need)
        return need <= free()

    def _new_pages(self, request: LiveRequest, num_new: int) -> int:
        """Fresh pages for its next `num_new` tokens, and for its encoder's before the first."""
        state = request.state
        return self._pages(state.num_columns, state.columns_for(num_new))

    def _pages(self, start: int, count: int) -> int:
        """Fresh pages for `count` slots behind the first `start`."""
        return -(-(start + count) // self._page_size) - -(-start // self._page_size)

    def _retract(self) -> None:
        """Take the memory of the request that arrived last; it runs again later."""
        request = max(self.prefilling + self.decoding, key=lambda one: one.id)
        (self.prefilling if request in self.prefilling else self.decoding).remove(request)
        self._cache.release(request)
        insort(self.waiting, request, key=lambda one: one.id)
        self._closed = True
        self.stats.retractions += 1

    def _admit(self, chunks: list[tuple[LiveRequest, int]]) -> None:
        """Let waiting requests in while rows, the step's tokens and memory suffice."""
        room = self._room() - sum(count for _, count in chunks)
        rows = self._max_running - len(self.prefilling) - len(self.decoding)
        idle = not self.prefilling and not self.decoding
        if not rows or (self._closed and not idle):
            return
        for request in self.waiting[: self._max_running]:
            if not room or not rows:
                break
            match = self._cache.match(request)
            if self._worth_waiting(request, match.slots.shape[0]):
                continue
            self._cache.lock(match)
            if not self._fits(request, match):
                self._cache.unlock(match)
                self._closed = True
                break
            count = self._let_in(request, match, room)
            chunks.append((request, count))
            room, rows = room - count, rows - 1
        # Fits, as every one admitted was checked against what all the others still need.
        self._make_room(chunks)

    def _worth_waiting(self, request: LiveRequest, num_cached: int) -> bool:
        """Whether a prompt that is being run begins as this one does, beyond what is cached."""
        if not self._cache.shares(request):
            return False
        pages = -(-WORTH_WAITING // self._page_size)
        end = num_cached + pages * self._page_size
        ids = request.state.token_ids
        return len(ids) > end and any(
            other.state.token_ids[:end] == ids[:end] and self._cache.shares(other)
            for other in self.prefilling
        )

    def _fits(self, request: LiveRequest, match: PrefixMatch) -> bool:
        """Whether there is memory for its whole prompt beside what the running ones still need."""
        need = self._new_pages(request, request.state.num_pending)
        need -= match.slots.shape[0] // self._page_size
        for one in self.prefilling:
            need += self._new_pages(one, one.state.num_pending)
        for one in self.prefilling + self.decoding:
            need += self._pages(0, min(one.num_remaining, GROWTH))
        return need * self._page_size <= self._cache.obtainable

    def _let_in(self, request: LiveRequest, match: PrefixMatch, room: int) -> int:
        self._cache.admit(request, match)
        self.waiting.remove(request)
        self.prefilling.append(request)
        if request.reused_tokens is None:
            request.reused_tokens = match.slots.shape[0]
            self.stats.prompt_tokens += request.prompt_len
            self.stats.reused_tokens += request.reused_tokens
        return min(request.state.num_pending, room)
