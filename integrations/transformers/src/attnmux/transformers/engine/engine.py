"""The loop: requests come and go while every step runs those that are there."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from transformers import PreTrainedTokenizerBase

from attnmux.core import InvalidInput
from attnmux.transformers.engine.execution import Execution, StepRunner
from attnmux.transformers.engine.prefix import MemoryUse, PrefixCache
from attnmux.transformers.engine.request import (
    FinishReason,
    GenerationResult,
    LiveRequest,
    OnText,
    OutputQueue,
    TokenOutput,
    check_request,
)
from attnmux.transformers.engine.scheduler import Plan, Scheduler
from attnmux.transformers.engine.stats import EngineStats, Laps
from attnmux.transformers.sampling import NOT_A_NUMBER, Sampler, SamplingParams
from attnmux.transformers.sequence import SequenceState
from attnmux.transformers.tokenization import TextStream, read_ids

PREFILL_TOKENS = 8192
"""Prompt tokens of one step: longer prompts come in chunks, which bounds the activations and the
time that decoding requests wait."""


class Engine:
    """Continuous batching on one runner, which is the engine's alone.

    What a request generates is what it would generate alone, up to rounding in the model, whatever
    shares its steps. Not to be used from several threads at once.
    The cached prefixes belong to the runner: an engine that follows on the same runner finds them.
    """

    def __init__(
        self,
        runner: StepRunner,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        stop_ids: Collection[int] = (),
        max_running: int | None = None,
        prefill_tokens: int = PREFILL_TOKENS,
        prefix_cache: bool = True,
    ) -> None:
        """tokenizer: makes text of the tokens. stop_ids: end a request, unless it has its own.

        max_running: requests in memory at a time; None as many as the runner has rows for.
        prefill_tokens: prompt tokens of one step, beside the decoding requests' one each.
        prefix_cache: keep what was computed, for prompts that begin alike.
        """
        self.runner = runner
        self.tokenizer = tokenizer
        self.stop_ids = frozenset(stop_ids)
        self.stats = EngineStats()
        self._cache = PrefixCache(runner.steps, enabled=prefix_cache)
        self._scheduler = Scheduler(
            self._cache, self.stats, max_running=max_running, prefill_tokens=prefill_tokens
        )
        self._execution = Execution(runner)
        self._live: dict[int, LiveRequest] = {}
        self._next_id = 0
        self._running: Plan | None = None
        """The step that is in flight."""
        self._to_free: list[tuple[LiveRequest, bool]] = []
        """Requests that have ended, and whether the cache may keep what they computed."""
        self._outputs = OutputQueue()

    @property
    def has_work(self) -> bool:
        """Whether a step would do something."""
        return bool(self._live or self._outputs)

    @property
    def memory(self) -> MemoryUse:
        """Who has the pool's pages."""
        return self._cache.memory

    def check(
        self,
        token_ids: Sequence[int],
        max_new_tokens: int,
        *,
        encoder_len: int = 0,
        name: str = "token_ids",
    ) -> None:
        """Refuse a request that can never run.

        Raises InvalidInput for a prompt that the model cannot read, and PoolExhausted for one that
        does not fit into the pool even when it is alone there.
        """
        check_request(
            name,
            read_ids(name, token_ids),
            max_new_tokens,
            encoder_len=encoder_len,
            vocabulary_size=self.runner.vocabulary_size,
            steps=self.runner.steps,
        )

    def add(
        self,
        token_ids: Sequence[int],
        *,
        max_new_tokens: int,
        sampling: SamplingParams | None = None,
        stop_ids: Collection[int] | None = None,
        on_text: OnText | None = None,
        encoder_states: torch.Tensor | None = None,
    ) -> int:
        """Queue a prompt of token ids. Returns the request's id.

        The request ends at a stop id, at its last new token, or when its context is full.
        on_text: called from `step` with the text as it grows. It may add and abort requests. What
        it raises comes out of `step`, with the engine in order.
        encoder_states: [E, width], for an encoder-decoder model.
        Raises as `check` does, and InvalidInput for on_text without a tokenizer.
        """
        token_ids = read_ids("token_ids", token_ids)
        state = SequenceState(token_ids=token_ids[:], encoder_states=encoder_states)
        self.check(token_ids, max_new_tokens, encoder_len=state.encoder_len)
        if on_text is not None and self.tokenizer is None:
            raise InvalidInput("on_text", got="no tokenizer", expected="an engine with one")
        context = self.runner.steps.max_context_len
        request = LiveRequest(
            id=self._next_id,
            prompt_len=len(token_ids),
            state=state,
            end_len=min(len(token_ids) + max_new_tokens, context + 1),
            stop_ids=self.stop_ids if stop_ids is None else frozenset(stop_ids),
            sampler=Sampler(sampling or SamplingParams()),
            stream=None if self.tokenizer is None else TextStream(self.tokenizer, token_ids),
            on_text=on_text,
            num_said=len(token_ids),
        )
        self._next_id += 1
        self._live[request.id] = request
        self._scheduler.add(request)
        return request.id

    def abort(self, request_id: int) -> GenerationResult | None:
        """End a request now. Returns what it has so far; None where it had ended before.

        All that it holds is free when this returns or, called while the model runs, when the
        running step ends, also where the tokenizer raises for the last of its text. Nothing more is
        said about it. Raises InvalidInput for an unknown id.
        """
        if not 0 <= request_id < self._next_id:
            raise InvalidInput("request_id", got=request_id, expected="an id that `add` returned")
        request = self._live.get(request_id)
        if request is None:
            return None
        self._abort(request)
        if self._running is None:
            self._free_ended()
        request.new_text()
        return request.result()

    def clear_cache(self) -> None:
        """Forget the cached prefixes that no running request reads."""
        self._cache.clear()

    def step(self) -> list[TokenOutput]:
        """Run the next step. Returns the new tokens; none where it only ran parts of prompts.

        What the model raises comes out; then the step's requests have been aborted, and the others
        go on with the next step. What the tokenizer or a listener raises comes out too; the next
        step returns the tokens of this one as well, and nothing is lost. Raises InvalidInput when
        called while the model runs, and PoolExhausted where others hold so much of the pool that
        nothing can run.
        """
        if self._running is not None:
            raise InvalidInput("step", got="a call while a step runs", expected="one at a time")
        laps = Laps()
        plan = self._scheduler.plan()
        laps.lap("schedule")
        if plan is not None:
            self._run(plan, laps)
        try:
            return self._outputs.deliver()
        finally:
            laps.lap("stream")
            if plan is not None:
                self.stats.count(plan.kind, plan.num_prompt_tokens, len(plan.sampled), laps)

    def _run(self, plan: Plan, laps: Laps) -> None:
        self._running = plan
        try:
            self._commit(plan, self._execution.run(plan, laps))
        except BaseException:
            self._fail(plan)
            raise
        finally:
            self._running = None
            self._free_ended()
            laps.lap("commit")

    def _commit(self, plan: Plan, tokens: Sequence[int]) -> None:
        """Give the tokens to their requests; those that are done end."""
        for request, token in zip(plan.sampled, tokens, strict=True):
            if request.finish_reason is None:
                self._take(request, token)
        for request, _ in plan.chunks:
            if not request.ended:
                self._cache.store(request)
        self._scheduler.started(plan.sampled[len(plan.decoding) :])

    def _take(self, request: LiveRequest, token: int) -> None:
        ids = request.state.token_ids
        if token == NOT_A_NUMBER:
            self._end(request, "error", keep=False)
        else:
            ids.append(token)
            if token in request.stop_ids:
                self._end(request, "stop")
            elif len(ids) >= request.end_len:
                self._end(request, "length")
        is_last = request.finish_reason is not None
        self.stats.finished += is_last
        self._outputs.add(request, token, is_last)

    def _end(self, request: LiveRequest, reason: FinishReason, *, keep: bool = True) -> None:
        """Its memory is freed by `_free_ended`. keep: what it computed is of use to others."""
        request.finish_reason = reason
        del self._live[request.id]
        self._to_free.append((request, keep))

    def _abort(self, request: LiveRequest) -> None:
        self.stats.aborted += 1
        self._end(request, "abort")
        self._outputs.forget(request)

    def _fail(self, plan: Plan) -> None:
        """The step has not run to its end: what it should have written is not there."""
        self._execution.forget()
        for request in plan.requests:
            if not request.ended:
                self._abort(request)
        self._to_free = [(request, False) for request, _ in self._to_free]

    def _free_ended(self) -> None:
        if not self._to_free:
            return
        ended, self._to_free = self._to_free, []
        for request, keep in ended:
            self._cache.release(request, keep=keep)
        self._scheduler.drop_ended()
