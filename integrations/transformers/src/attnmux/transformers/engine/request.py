"""Requests in the engine: checks and state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from attnmux.core import InvalidInput, PoolExhausted
from attnmux.transformers.requests.batching import StepBuilder
from attnmux.transformers.requests.prefixes import PrefixNode
from attnmux.transformers.requests.prompt_images import PromptImages, check_prompt_images
from attnmux.transformers.requests.sampling import Sampler, TokenLogprobs
from attnmux.transformers.requests.sequence import SequenceState, check_encoder_len
from attnmux.transformers.requests.text import TextStream, check_prompt
from attnmux.transformers.run.stats import Kind

FinishReason = Literal["stop", "length", "abort", "error"]

OnText = Callable[[str, bool], None]
"""Called with the next piece of a text and whether it is the last. A piece has whole characters;
the last may be empty."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationResult:
    """The result of one prompt."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    """The generated tokens, with the stop id if there was one."""
    text: str | None
    """Without the stop id; None without a tokenizer."""
    finish_reason: FinishReason
    """"abort": a step with the request raised an exception, which came out of `Engine.step`."""
    reused_tokens: int
    """Leading tokens of the prompt whose K and V were in the cache already."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Logprobs of each generated token, if `SamplingParams.logprobs` asks for them."""


class TokenOutput(NamedTuple):
    """One new token of a request."""

    request_id: int
    token_id: int
    """NOT_A_NUMBER if the finish reason is "error" or "abort"."""
    result: GenerationResult | None
    """The whole result, with the last token; None before."""


@dataclass(kw_only=True, slots=True, eq=False)
class LiveRequest:
    """One request from `Engine.add` to its end."""

    id: int
    """Counts up in order of arrival."""
    prompt_len: int
    state: SequenceState
    end_len: int
    """The request ends at this number of tokens, prompt included."""
    stop_ids: frozenset[int]
    sampler: Sampler
    stream: TextStream | None
    on_text: OnText | None
    node: PrefixNode | None = None
    """Its node of the prefix tree, locked from admission to release."""
    stop: int = 0
    """Tokens, whole pages, after which a step of its prompt ends: others share them, and linear
    layers have no states there yet. They are kept then."""
    reads_shared_window: bool = False
    """Whether its windows reach into the node's prefix, so that the windows there are locked."""
    reused_tokens: int | None = None
    """None until it is admitted for the first time."""
    finish_reason: FinishReason | None = None
    is_sound: bool = True
    """Whether K and V that were computed since its pages were stored are valid. If not, the pages
    are zeroed before they are freed."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Logprobs of its new tokens, if it asks for them."""
    pieces: list[str] = field(default_factory=list)
    num_said: int = 0
    """Tokens, prompt included, whose text is in `pieces` or waits in `stream` for more bytes."""

    @property
    def num_remaining(self) -> int:
        """The most tokens that it can still generate."""
        return self.end_len - len(self.state.token_ids)

    @property
    def ended(self) -> bool:
        return self.finish_reason is not None

    def new_text(self) -> str:
        """The whole characters that its new tokens complete; all that is left once it has ended.
        Without the stop id."""
        if self.stream is None:
            return ""
        begin, end = self.num_said, len(self.state.token_ids) - (self.finish_reason == "stop")
        # Before the tokenizer runs, which may raise: the stream has the tokens then.
        self.num_said = end
        piece = self.stream.put(*self.state.token_ids[begin:end])
        if self.ended:
            piece += self.stream.end()
        if piece:
            self.pieces.append(piece)
        return piece

    def result(self) -> GenerationResult:
        """The result of an ended request, with the text that `new_text` has returned."""
        assert self.finish_reason is not None
        ids = tuple(self.state.token_ids)
        return GenerationResult(
            prompt_ids=ids[: self.prompt_len],
            token_ids=ids[self.prompt_len :],
            text=None if self.stream is None else "".join(self.pieces),
            finish_reason=self.finish_reason,
            reused_tokens=self.reused_tokens or 0,
            logprobs=tuple(self.logprobs),
        )


def check_request(
    name: str,
    token_ids: Sequence[int],
    max_new_tokens: int,
    *,
    encoder_len: int,
    vocabulary_size: int,
    steps: StepBuilder,
    images: PromptImages | None = None,
    prefill_tokens: int,
) -> None:
    """Raise InvalidInput for a prompt that the model cannot read, and PoolExhausted for a request
    that does not fit into an empty pool."""
    InvalidInput.check_at_least(1, "max_new_tokens", max_new_tokens)
    if images is None:
        check_prompt(name, token_ids, vocabulary_size, steps.max_context_len)
    else:
        check_prompt_images(token_ids, images, prefill_tokens)
        check_prompt(name, images.text_ids, vocabulary_size, steps.max_context_len)
    check_encoder_len(encoder_len, steps.max_encoder_len)
    # The last token never runs, so it needs no slot.
    longest = encoder_len + min(len(token_ids) + max_new_tokens - 1, steps.max_context_len)
    page_size, size = steps.allocator.page_size, steps.allocator.size
    wanted = -(-longest // page_size) * page_size
    if wanted > size:
        raise PoolExhausted(
            f"KV slots for {name}",
            wanted=wanted,
            available=size,
            hint="ask for fewer new tokens, shorten the prompt, or make the KV pool larger",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """One step: one token of every decoding request, and chunks of prompts."""

    decoding: list[LiveRequest]
    chunks: list[tuple[LiveRequest, int]]
    """Requests with the number of pending tokens to run. Those that run all of them come first."""
    sampled: list[LiveRequest]
    """The requests that get a next token. They come first in the step."""

    @property
    def kind(self) -> Kind:
        if not self.chunks:
            return "decode"
        return "mixed" if self.decoding else "extend"

    @property
    def requests(self) -> list[LiveRequest]:
        return self.decoding + [request for request, _ in self.chunks]

    def told(self) -> list[tuple[int, ...]]:
        """Numbers of each request that tell one step from another: its id, its tokens and the last
        of them, and those with K and V."""
        states = [(request.id, request.state) for request in self.requests]
        return [
            (number, len(state.token_ids), state.token_ids[-1], state.num_cached)
            for number, state in states
        ]

    @property
    def num_prompt_tokens(self) -> int:
        return sum(count for _, count in self.chunks)
