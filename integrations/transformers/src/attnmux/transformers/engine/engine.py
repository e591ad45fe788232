"""The engine: requests come and go, and each step runs those that are present."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence

import torch
from transformers import PreTrainedTokenizerBase

from attnmux.core import InvalidInput, PoolExhausted
from attnmux.parts import AcceptThresholds, DraftTree
from attnmux.transformers.draft.proposers import Proposer
from attnmux.transformers.engine.acceptance import Verification
from attnmux.transformers.engine.accounts import Accounts, RunningStep
from attnmux.transformers.engine.delivery import Delivery
from attnmux.transformers.engine.execution import Execution, Launched
from attnmux.transformers.engine.prefix import MemoryUse, PrefixCache
from attnmux.transformers.engine.request import (
    GenerationResult,
    LiveRequest,
    OnText,
    Plan,
    TokenOutput,
    check_request,
)
from attnmux.transformers.engine.scheduler import Scheduler
from attnmux.transformers.engine.speculation import Speculation
from attnmux.transformers.requests.prompt_images import PromptImages
from attnmux.transformers.requests.sampling import Sampler
from attnmux.transformers.requests.sampling_params import SamplingParams
from attnmux.transformers.requests.sequence import SequenceState
from attnmux.transformers.requests.text import TextStream, read_ids
from attnmux.transformers.run.stats import EngineStats, Laps
from attnmux.transformers.run.step_runner import StepRunner

PREFILL_TOKENS = 8192
"""Prompt tokens of one step. Longer prompts run in chunks, which bounds the activations and the
time that decoding requests wait."""


class Engine:
    """Continuous batching on one runner. The runner belongs to the engine alone.

    A request generates what it would generate alone, up to rounding in the model. One thread at a
    time may use an engine; calls from others raise InvalidInput. The cached prefixes belong to the
    runner: the next engine on the same runner finds them.

    On a device that works while the host does, the next step is launched before the tokens of this
    one are read, if the same requests decode in it. A request that then ends by a stop id has run
    one token more, which is dropped.

    An exception in a step loses no page, and the other requests go on. Those of the step end with
    the finish reason "abort", in the outputs of the next call of `step`. If an exception
    interrupts the engine's own accounts, all memory is freed at once, the cached prefixes included,
    and the requests run again from their tokens.
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
        drafts: Proposer | None = None,
        accept: AcceptThresholds | None = None,
        draft_always: bool = False,
        overlap: bool | None = None,
    ) -> None:
        """tokenizer: turns tokens into text. stop_ids: end every request that has none of its own.

        max_running: the most requests in memory; None means one for each row of the runner.
        prefill_tokens: the most prompt tokens of a step. Each decoding request adds one token.
        prefix_cache: keep K and V for later prompts that begin with the same tokens. A prefix of a
        model with linear layers counts as cached if its states were kept, see
        `RunnerOptions.kept_states`. A deterministic runner keeps none, since other requests' states
        would cut a prompt elsewhere.
        drafts: guesses tokens that decode steps then verify. Steps with prompts run without.
        accept: which drafts of sampled requests are accepted; None keeps their texts.
        draft_always: draft in every step that decodes. Otherwise steps draft while this pays, by
        each request's acceptance and the time of steps, and try again now and then. Several ranks,
        and thresholds, draft in every step.
        overlap: launch steps ahead; None does so on every device but the CPU. Steps with drafts
        are never launched ahead.
        Raises InvalidInput for drafts if the model has an encoder, or if ranks have requests
        of their own.
        """
        self.runner = runner
        self.tokenizer = tokenizer
        self.stop_ids = frozenset(read_ids("stop_ids", stop_ids))
        accept = AcceptThresholds() if accept is None else accept
        if not isinstance(accept, AcceptThresholds):
            raise InvalidInput("accept", got=repr(accept), expected="AcceptThresholds")
        self.stats = EngineStats()
        alone = runner.is_deterministic
        self._cache = PrefixCache(runner.steps, enabled=prefix_cache and not alone)
        self._scheduler = Scheduler(
            self._cache,
            self.stats,
            max_running=max_running,
            prefill_tokens=prefill_tokens,
            deterministic=alone,
        )
        self._execution = Execution(runner)
        self._speculation = None
        if isinstance(drafts, str):
            expected = "a Proposer, such as NgramProposer(draft_token_num=8)"
            raise InvalidInput("drafts", got=repr(drafts), expected=expected)
        if drafts is not None and alone:
            expected = "none: steps that verify have other sums than those that decode"
            raise InvalidInput("drafts", got="some, of a deterministic runner", expected=expected)
        if drafts is not None and runner.ranks.requests.num_parts > 1:
            expected = "none if ranks have requests of their own"
            raise InvalidInput("drafts", got=type(drafts).__name__, expected=expected)
        if drafts is not None:
            self._speculation = Speculation(
                drafts, self._cache, self.stats, accept, runner, always=draft_always
            )
        self._accounts = Accounts(
            cache=self._cache,
            scheduler=self._scheduler,
            execution=self._execution,
            speculation=self._speculation,
            stats=self.stats,
        )
        self._next_id = 0
        overlap = runner.steps.device.type != "cpu" if overlap is None else overlap
        self._runs_ahead = overlap
        self._lock = threading.RLock()

    @property
    def has_work(self) -> bool:
        """Whether there are requests to run or outputs to return."""
        return bool(self._accounts.live or self._accounts.outputs)

    @property
    def memory(self) -> MemoryUse:
        """The owners of the pool's pages."""
        return self._cache.memory

    @property
    def window_memory(self) -> MemoryUse | None:
        """The owners of the window pool's pages; None if one pool holds all layers."""
        return self._cache.window_memory

    def check(
        self,
        token_ids: Sequence[int],
        max_new_tokens: int,
        *,
        encoder_len: int = 0,
        encoder_states: torch.Tensor | None = None,
        images: PromptImages | None = None,
        name: str = "token_ids",
    ) -> None:
        """Refuse a request that can never run.

        encoder_len: of an encoder-decoder model's request whose states are not there yet.
        Raises InvalidInput for a prompt that the model cannot read, and PoolExhausted for one that
        does not fit into the pool even when it is alone there.
        """
        self.runner.steps.check_images(images)
        if encoder_states is not None:
            self.runner.steps.check_encoder_states(encoder_states)
            encoder_len = encoder_states.shape[0]
        check_request(
            name,
            read_ids(name, token_ids),
            max_new_tokens,
            encoder_len=encoder_len,
            vocabulary_size=self.runner.vocabulary_size,
            steps=self.runner.steps,
            images=images,
            prefill_tokens=self._scheduler.prefill_tokens,
        )
        if images is not None and self._speculation is not None:
            raise InvalidInput("images", got="some, with drafts", expected="an engine without")

    def add(
        self,
        token_ids: Sequence[int],
        *,
        max_new_tokens: int,
        sampling: SamplingParams | None = None,
        stop_ids: Collection[int] | None = None,
        on_text: OnText | None = None,
        encoder_states: torch.Tensor | None = None,
        images: PromptImages | None = None,
    ) -> int:
        """Queue a prompt of token ids. Returns the request's id.

        The request ends at a stop id, at its last new token, or when its context is full.
        on_text: called from `step` with each new piece of text. It may add and abort requests. Its
        exceptions come out of `step` and leave the engine consistent.
        encoder_states: [E, width], for an encoder-decoder model.
        images: of the prompt, from `ModelRunner.read_images`; `token_ids` are then its.
        Raises as `check` does, and InvalidInput for on_text without a tokenizer.
        """
        token_ids = read_ids("token_ids", token_ids)
        stops = self.stop_ids if stop_ids is None else frozenset(read_ids("stop_ids", stop_ids))
        sampling = SamplingParams() if sampling is None else sampling
        if not isinstance(sampling, SamplingParams):
            raise InvalidInput("sampling", got=repr(sampling), expected="SamplingParams")
        if sampling.logprobs is not None and self._speculation is not None:
            raise InvalidInput("logprobs", got="some, with drafts", expected="an engine without")
        self.check(token_ids, max_new_tokens, encoder_states=encoder_states, images=images)
        state = SequenceState(token_ids=token_ids[:], encoder_states=encoder_states, images=images)
        if on_text is not None and self.tokenizer is None:
            raise InvalidInput("on_text", got="no tokenizer", expected="an engine with one")
        context = self.runner.steps.max_context_len
        request = LiveRequest(
            id=self._next_id,
            prompt_len=len(token_ids),
            state=state,
            end_len=min(len(token_ids) + max_new_tokens, context + 1),
            stop_ids=stops,
            sampler=Sampler(sampling),
            stream=None if self.tokenizer is None else TextStream(self.tokenizer, token_ids),
            on_text=on_text,
            num_said=len(token_ids),
        )
        with self._turn():
            self._accounts.settle()
            self._next_id += 1
            self._scheduler.add(request)
            return self._accounts.live.setdefault(request.id, request).id

    def abort(self, request_id: object) -> GenerationResult | None:
        """End a request now. Returns its result so far, or None if it had ended before.

        Its memory is free when this returns. If a step is running, or was launched ahead, it is
        free when that step ends. Both hold even if the tokenizer raises for the last piece of
        text. The request gets no further output. Raises InvalidInput for an unknown id.
        """
        if not isinstance(request_id, int) or not 0 <= request_id < self._next_id:
            raise InvalidInput("request_id", got=request_id, expected="an id that `add` returned")
        with self._turn():
            request = self._accounts.live.get(request_id)
            if request is None or request.ended:
                return None
            self._accounts.abort(request)
            if self._accounts.running is None:
                self._accounts.settle()
            request.new_text()
            return request.result()

    def clear_cache(self) -> None:
        """Free the cached prefixes that no running request reads."""
        with self._turn():
            self._accounts.settle()
            self._accounts.intact = False
            self._cache.clear()
            self._accounts.intact = True

    def reset(self) -> None:
        """Abort every request without output and free all of the runner's memory.

        Any thread may call it once no other thread uses the engine.
        """
        self._lock = threading.RLock()
        self._accounts.reset()

    def step(self) -> list[TokenOutput]:
        """Run the next step. Returns the new tokens; none if it only ran parts of prompts.

        If the model raises, the step's requests are aborted and the others continue with the next
        step. If the tokenizer or a listener raises, no token is lost: the next step returns those
        of this step as well. Raises InvalidInput when called while the model runs, and
        PoolExhausted if others hold so much of the pool that nothing can run.
        """
        accounts, laps = self._accounts, Laps()
        plan, drafts, num_new = None, None, 0
        with self._turn():
            if accounts.running is not None:
                raise InvalidInput("step", got="a call while a step runs", expected="one at a time")
            try:
                accounts.settle()
                plan = self._next_plan() if accounts.ahead is None else accounts.ahead.plan
                laps.lap("schedule")
                if plan is not None:
                    drafts = self._draft(plan, laps)
                    with RunningStep(accounts, plan, laps) as running:
                        self.runner.ranks.steps.check_step(plan.kind, plan.told)
                        step: Launched | Verification
                        if self._speculation is not None and drafts is not None:
                            self._execution.forget()
                            step = self._speculation.launch(plan.decoding, drafts, laps)
                        else:
                            ahead, accounts.ahead = accounts.ahead, None
                            step = ahead or self._execution.launch(plan, laps)
                            if self._runs_ahead and self._repeats(plan, laps):
                                laps.lap("schedule")
                                accounts.ahead = self._execution.launch(plan, laps, ahead=True)
                        delivery = Delivery(plan, accounts.outputs, self.stats)
                        tokens = step.wait(laps)
                        running.commits = True
                        num_new = self._commit(plan, tokens, delivery)
                        step.tell()
            finally:
                accounts.running = None  # also where an interrupt hits the end of the block above
            self._tell(plan, num_new, laps)
            if self._speculation is not None and plan is not None and not plan.chunks:
                self._speculation.time(plan.decoding, laps, verified=drafts is not None)
        return accounts.outputs.hand_over()

    def idle(self) -> bool:
        """Take part in a step of other ranks' requests, when this engine has none to run.

        Returns False if no rank has any. Ranks whose requests differ call it until then, so that
        none of them waits for another. Raises InvalidInput for an engine with work.
        """
        with self._turn():
            if self.has_work:
                raise InvalidInput("idle", got="an engine with requests", expected="`step` instead")
            return self.runner.idle()

    def _turn(self) -> Turn:
        return Turn(self._lock, self._accounts.settle)

    def _next_plan(self) -> Plan | None:
        self._accounts.intact = False
        plan = self._scheduler.plan()
        self._accounts.intact = True
        if plan is None and self._accounts.live:
            page_size = self.runner.steps.allocator.page_size
            raise PoolExhausted(
                "KV slots for the next step",
                wanted=page_size,
                available=self.runner.steps.allocator.available_size(),
                hint="slots that no request of this engine holds are missing: a runner serves one "
                "engine at a time, and `reset` frees what another has left",
            )
        return plan

    def _draft(self, plan: Plan, laps: Laps) -> DraftTree | None:
        """Drafts for a step that only decodes, with room for them."""
        if self._speculation is None or plan.chunks or self._accounts.ahead is not None:
            return None
        drafts = self._speculation.drafts(plan.decoding)
        laps.lap("draft")
        if drafts is not None:
            self._accounts.intact = False
            self._speculation.make_room(plan.decoding, drafts)
            self._accounts.intact = True
        return drafts

    def _repeats(self, plan: Plan, laps: Laps) -> bool:
        """Whether the next step decodes the requests of this one, and without drafts."""
        if not self._scheduler.repeats(plan):
            return False
        rests = self._speculation is None or self._speculation.rests(plan.decoding)
        laps.lap("draft")
        return rests

    def _tell(self, plan: Plan | None, num_new: int, laps: Laps) -> None:
        try:
            self._accounts.outputs.tell()
        finally:
            laps.lap("stream")
            if plan is not None:
                self.stats.count(plan.kind, plan.num_prompt_tokens, num_new, laps)

    def _commit(self, plan: Plan, tokens: Sequence[list[int]], delivery: Delivery) -> int:
        """Give the tokens to their requests. Returns the number of tokens."""
        num_new = delivery.give(tokens, any_ended=self._accounts.has_ended)
        self._accounts.has_ended |= delivery.has_ended
        if self._speculation is not None:
            self._speculation.commit(plan.decoding, is_whole=delivery.is_whole)
        for request, _ in plan.chunks:
            if not request.ended:
                self._cache.store(request)
        self._scheduler.started(plan.sampled[len(plan.decoding) :])
        return num_new


class Turn:
    """A call of the engine, by one thread at a time. A call that raises leaves the accounts
    settled.

    Not a generator: one that an interrupt leaves suspended would settle much later.
    """

    def __init__(self, lock: threading.RLock, settle: Callable[[], None]) -> None:
        self._lock, self._settle = lock, settle

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise InvalidInput(
                "engine", got="a call while another thread uses it", expected="one thread at a time"
            )

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is not None:
                self._settle()
        finally:
            self._lock.release()
