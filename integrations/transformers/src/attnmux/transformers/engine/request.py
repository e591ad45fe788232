"""A request on its way through the engine, and what became of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from attnmux.core.kv.prefix_node import PrefixNode
from attnmux.transformers.detokenize import TextStream
from attnmux.transformers.sampling import Sampler
from attnmux.transformers.sequence import SequenceState

FinishReason = Literal["stop", "length", "abort", "error"]

OnText = Callable[[str, bool], None]
"""Called with the next piece of a text (whole characters, at the end perhaps none) and whether
that was the last."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationResult:
    """What became of one prompt."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    """Generated, the stop id included where there was one."""
    text: str | None
    """Without the stop id; None where there is no tokenizer."""
    finish_reason: FinishReason
    reused_tokens: int
    """Leading tokens of the prompt whose K and V were in the cache already."""


class TokenOutput(NamedTuple):
    """One new token of a request."""

    request_id: int
    token_id: int
    """NOT_A_NUMBER where the finish reason is "error"."""
    result: GenerationResult | None
    """With the last token: the whole."""


@dataclass(kw_only=True, slots=True, eq=False)
class LiveRequest:
    """One request from `Engine.add` to its end."""

    id: int
    """Counts up in order of arrival."""
    prompt_len: int
    state: SequenceState
    end_len: int
    """Tokens, prompt included, at which it ends whatever they are."""
    stop_ids: frozenset[int]
    sampler: Sampler
    stream: TextStream | None
    on_text: OnText | None
    node: PrefixNode | None = None
    """Of the prefix tree: locked from its admission to its release."""
    reused_tokens: int | None = None
    """None until it is admitted for the first time."""
    finish_reason: FinishReason | None = None
    pieces: list[str] = field(default_factory=list)
    num_said: int = 0
    """Tokens, prompt included, whose text is in `pieces` or waits in `stream` for more bytes."""

    @property
    def num_remaining(self) -> int:
        """Tokens that it may still generate."""
        return self.end_len - len(self.state.token_ids)

    @property
    def ended(self) -> bool:
        return self.finish_reason is not None

    def new_text(self) -> str:
        """The whole characters that its new tokens complete; of one that has ended all that is
        left. A stop id is no part of it."""
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
        """Of one that has ended, with the text that `new_text` has returned."""
        assert self.finish_reason is not None
        ids = tuple(self.state.token_ids)
        return GenerationResult(
            prompt_ids=ids[: self.prompt_len],
            token_ids=ids[self.prompt_len :],
            text=None if self.stream is None else "".join(self.pieces),
            finish_reason=self.finish_reason,
            reused_tokens=self.reused_tokens or 0,
        )
