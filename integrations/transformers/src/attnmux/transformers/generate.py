"""Text for a fixed set of prompts: batched prefill, then batched decode until all are done."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from transformers import PreTrainedTokenizerBase

from attnmux.core.errors import AttnmuxError, InvalidInput
from attnmux.transformers.detokenize import TextStream
from attnmux.transformers.prompts import check_prompt
from attnmux.transformers.runner import ModelRunner
from attnmux.transformers.sampling import NOT_A_NUMBER, Sampler, SamplingParams
from attnmux.transformers.sequence import SequenceState

MAX_PREFILL_TOKENS = 8192
"""Tokens of one prefill step: longer prompts come in chunks, which bounds the activations."""

OnText = Callable[[int, str, bool], None]
"""Called with a prompt's index, the next piece of its text (whole characters, at the end perhaps
none) and whether that was the last."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationResult:
    """What became of one prompt."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    """Generated, the stop id included where there was one."""
    text: str | None
    """Without the stop id; None where there is no tokenizer."""
    finish_reason: Literal["stop", "length"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Timings:
    """Wall time of the two phases. A prompt's first token belongs to its prefill."""

    prefill_tokens: int
    """Prompt tokens that were run."""
    prefill_seconds: float
    decode_tokens: int
    """Tokens that decode steps made."""
    decode_seconds: float

    @property
    def prefill_tokens_per_second(self) -> float:
        return self.prefill_tokens / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def decode_tokens_per_second(self) -> float:
        return self.decode_tokens / self.decode_seconds if self.decode_seconds else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """The results in the order of the prompts."""

    results: tuple[GenerationResult, ...]
    timings: Timings


@dataclass(kw_only=True, slots=True, eq=False)
class _Running:
    """One prompt on its way."""

    index: int
    prompt_len: int
    state: SequenceState
    stream: TextStream | None
    pieces: list[str] = field(default_factory=list)
    finish_reason: Literal["stop", "length"] | None = None


class Generator:
    """Generates text with a runner's model."""

    def __init__(
        self,
        runner: ModelRunner,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        stop_ids: Collection[int] = (),
        max_prefill_tokens: int = MAX_PREFILL_TOKENS,
    ) -> None:
        if max_prefill_tokens < 1:
            raise InvalidInput("max_prefill_tokens", came=max_prefill_tokens, expected="at least 1")
        self.runner = runner
        self.tokenizer = tokenizer
        self.stop_ids = frozenset(stop_ids)
        most = runner.steps.max_step_tokens or max_prefill_tokens
        self.max_prefill_tokens = min(most, max_prefill_tokens)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        sampling: SamplingParams | None = None,
        on_text: OnText | None = None,
    ) -> Generation:
        """Continue prompts of token ids by up to `max_new_tokens` each.

        A request ends at a stop id, at its last new token, or when the context is full; then its
        memory is free for the others. However the call ends, it holds no memory afterwards.
        Raises InvalidInput for prompts that cannot run, before anything is allocated;
        PoolExhausted when the KV pool is too small for what is running.
        """
        self._check(prompts, max_new_tokens)
        sampler = Sampler(sampling or SamplingParams(), len(prompts))
        running = [self._start(index, ids) for index, ids in enumerate(prompts)]
        try:
            began = time.perf_counter()
            for batch, logits in self._prefill(running):
                self._take(batch, logits, sampler, max_new_tokens, on_text)
            prefilled = time.perf_counter()
            decoded = 0
            while batch := [one for one in running if one.finish_reason is None]:
                logits = self.runner.decode([one.state for one in batch])
                self._take(batch, logits, sampler, max_new_tokens, on_text)
                decoded += len(batch)
            ended = time.perf_counter()
        finally:
            self.runner.release([one.state for one in running])
        return Generation(
            results=tuple(_result(one) for one in running),
            timings=Timings(
                prefill_tokens=sum(one.prompt_len for one in running),
                prefill_seconds=prefilled - began,
                decode_tokens=decoded,
                decode_seconds=ended - prefilled,
            ),
        )

    def _check(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
        context = self.runner.context
        if max_new_tokens < 1:
            raise InvalidInput("max_new_tokens", came=max_new_tokens, expected="at least 1")
        if not 1 <= len(prompts) <= context.max_batch_size:
            raise InvalidInput(
                "prompts", came=len(prompts), expected=f"1 to {context.max_batch_size} at a time"
            )
        vocabulary_size = self.runner.vocabulary_size
        for index, ids in enumerate(prompts):
            check_prompt(f"prompt {index + 1}", ids, vocabulary_size, context.max_context_len)

    def _start(self, index: int, ids: Sequence[int]) -> _Running:
        return _Running(
            index=index,
            prompt_len=len(ids),
            state=SequenceState(token_ids=list(ids)),
            stream=None if self.tokenizer is None else TextStream(self.tokenizer, ids),
        )

    def _prefill(
        self, running: Sequence[_Running]
    ) -> Iterator[tuple[list[_Running], torch.Tensor]]:
        """Run all prompts in steps of a bounded size; yield those that are through, with logits."""
        waiting = list(running)
        while waiting:
            batch, counts, room = [], [], self.max_prefill_tokens
            for one in waiting:
                if room == 0:
                    break
                counts.append(min(one.state.num_pending, room))
                room -= counts[-1]
                batch.append(one)
            logits = self.runner.extend([one.state for one in batch], counts)
            # Only the last of a step can be cut off, and then it goes on in the next one.
            through = [one for one in batch if one.state.num_pending == 0]
            waiting = waiting[len(through) :]
            if through:
                yield through, logits[: len(through)]

    def _take(
        self,
        batch: Sequence[_Running],
        logits: torch.Tensor,
        sampler: Sampler,
        max_new_tokens: int,
        on_text: OnText | None,
    ) -> None:
        """Sample a token for each request of the batch; end and release those that are done."""
        tokens = sampler(logits, [one.index for one in batch]).tolist()
        for one, token in zip(batch, tokens, strict=True):
            if token == NOT_A_NUMBER:
                raise AttnmuxError(
                    f"the model's logits for prompt {one.index + 1} are not numbers: its weights "
                    "are damaged, or the dtype is too narrow for it (try another dtype)"
                )
            one.state.token_ids.append(token)
            self._finish_if_done(one, max_new_tokens)
            piece = self._piece(one, token)
            one.pieces.append(piece)
            finished = one.finish_reason is not None
            if on_text is not None and (piece or finished):
                on_text(one.index, piece, finished)
        self.runner.release([one.state for one in batch if one.finish_reason is not None])

    def _finish_if_done(self, one: _Running, max_new_tokens: int) -> None:
        length = len(one.state.token_ids)
        if one.state.token_ids[-1] in self.stop_ids:
            one.finish_reason = "stop"
        elif (
            length - one.prompt_len == max_new_tokens
            or length > self.runner.context.max_context_len
        ):
            one.finish_reason = "length"

    def _piece(self, one: _Running, token: int) -> str:
        if one.stream is None:
            return ""
        piece = "" if one.finish_reason == "stop" else one.stream.put(token)
        return piece if one.finish_reason is None else piece + one.stream.end()


def _result(one: _Running) -> GenerationResult:
    assert one.finish_reason is not None
    ids = tuple(one.state.token_ids)
    return GenerationResult(
        prompt_ids=ids[: one.prompt_len],
        token_ids=ids[one.prompt_len :],
        text=None if one.stream is None else "".join(one.pieces),
        finish_reason=one.finish_reason,
    )
