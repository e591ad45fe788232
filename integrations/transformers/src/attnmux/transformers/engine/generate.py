"""Text for a set of prompts: an engine run until all of them are done."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch

from attnmux.core import AttnmuxError, InvalidInput
from attnmux.transformers.engine.engine import Engine
from attnmux.transformers.engine.request import GenerationResult
from attnmux.transformers.requests.prompt_images import PromptImages
from attnmux.transformers.requests.sampling_params import SamplingParams
from attnmux.transformers.run.stats import EngineStats

OnText = Callable[[int, str, bool], None]
"""Called with a prompt's index, the next piece of its text (whole characters, at the end perhaps
none) and whether that was the last."""


GREEDY = SamplingParams()


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """A prompt of token ids and how to continue it."""

    token_ids: Sequence[int]
    max_new_tokens: int
    sampling: SamplingParams = GREEDY
    images: PromptImages | None = None
    """Images of the prompt, from `ModelRunner.read_images`; `token_ids` are then its."""
    encoder_states: torch.Tensor | None = None
    """For an encoder-decoder model, from `ModelRunner.encode`; `token_ids` are the decoder's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timings:
    """Wall time of the two phases. A prompt's first token belongs to its prefill."""

    prefill_tokens: int
    """Prompt tokens that were run; those of a request that had to wait for memory count again."""
    prefill_seconds: float
    """Seconds of the steps that ran prompts, with or without decoding requests among them."""
    decode_tokens: int
    """Tokens of the steps that only decoded."""
    decode_seconds: float

    @property
    def prefill_tokens_per_second(self) -> float:
        return self.prefill_tokens / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def decode_tokens_per_second(self) -> float:
        return self.decode_tokens / self.decode_seconds if self.decode_seconds else 0.0

    @classmethod
    def of(cls, stats: EngineStats) -> Timings:
        return cls(
            prefill_tokens=stats.extend.prompt_tokens + stats.mixed.prompt_tokens,
            prefill_seconds=stats.extend.seconds + stats.mixed.seconds,
            decode_tokens=stats.decode.new_tokens,
            decode_seconds=stats.decode.seconds,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """The results in the order of the prompts."""

    results: tuple[GenerationResult, ...]
    timings: Timings
    stats: EngineStats

    @property
    def reused_tokens(self) -> int:
        """Prompt tokens whose K and V were in the cache already."""
        return self.stats.reused_tokens

    @property
    def prompt_tokens(self) -> int:
        return self.stats.prompt_tokens


def run_prompts(
    engine: Engine, prompts: Sequence[Prompt], *, on_text: OnText | None = None
) -> Generation:
    """Continue the prompts on an engine that has nothing else to do.

    Several ranks call it with the same prompts, and each gets all results. If ranks have
    requests of their own, a rank runs its part of the prompts, and `on_text` gets the texts of the
    others when all are complete.

    However the call ends, none of its requests is left in the engine. The engine's stats are
    counted from zero.
    Raises InvalidInput and PoolExhausted for prompts that can never run, before any of them does;
    AttnmuxError if the model's logits are not numbers; RanksDiffer and RankFailed on several
    ranks.
    """
    _check_prompts(engine, prompts)
    ranks = engine.runner.ranks
    ranks.requests.check_prompts(lambda: [prompt.token_ids for prompt in prompts])
    indices = ranks.requests.deal(range(len(prompts)))[ranks.requests.part]
    results = _run(engine, {index: prompts[index] for index in indices}, on_text)
    while engine.idle():
        pass
    parts = ranks.requests.gather((results, engine.stats))
    everyones = {index: result for results_of, _ in parts for index, result in results_of.items()}
    if on_text is not None:
        for index, result in sorted(everyones.items()):
            if index not in indices:
                on_text(index, result.text or "", True)
    stats = EngineStats()
    for _, results_of in parts:
        stats.add(results_of)
    ordered = tuple(everyones[index] for index in range(len(prompts)))
    return Generation(results=ordered, timings=Timings.of(stats), stats=stats)


def _check_prompts(engine: Engine, prompts: object) -> None:
    """Raise as `run_prompts` does for prompts that can never run, and for a busy engine."""
    if not isinstance(prompts, Sequence) or not prompts:
        got = "none" if isinstance(prompts, Sequence) else f"a {type(prompts).__name__}"
        raise InvalidInput("prompts", got=got, expected="a sequence of at least one Prompt")
    if engine.has_work:
        raise InvalidInput("engine", got="one with requests", expected="one without")
    for index, prompt in enumerate(prompts):
        if not isinstance(prompt, Prompt):
            got = f"a {type(prompt).__name__}"
            raise InvalidInput(f"prompt {index + 1}", got=got, expected="a Prompt of token ids")
        engine.check(
            prompt.token_ids,
            prompt.max_new_tokens,
            encoder_states=prompt.encoder_states,
            images=prompt.images,
            name=f"prompt {index + 1}",
        )


def _run(
    engine: Engine, prompts: Mapping[int, Prompt], on_text: OnText | None
) -> dict[int, GenerationResult]:
    """The results of prompts, by their index."""
    engine.stats.reset()
    index_of = {
        engine.add(
            prompt.token_ids,
            max_new_tokens=prompt.max_new_tokens,
            sampling=prompt.sampling,
            encoder_states=prompt.encoder_states,
            images=prompt.images,
            on_text=None if on_text is None else partial(on_text, index),
        ): index
        for index, prompt in prompts.items()
    }
    results: dict[int, GenerationResult] = {}
    try:
        while engine.has_work:
            for output in engine.step():
                if output.result is not None:
                    index = index_of[output.request_id]
                    results[index] = _usable(output.result, index)
    finally:
        with ExitStack() as stack:  # all of them, also where the tokenizer fails for one
            for request_id in index_of:
                stack.callback(engine.abort, request_id)
    return results


def _usable(result: GenerationResult, index: int) -> GenerationResult:
    if result.finish_reason == "error":
        raise AttnmuxError(
            f"the model's logits for prompt {index + 1} are not numbers: its weights are damaged, "
            "or the dtype is too narrow for it (try another dtype)"
        )
    return result
