"""One step, as the scheduler plans it."""

from __future__ import annotations

from dataclasses import dataclass

from attnmux.transformers.engine.request import LiveRequest
from attnmux.transformers.run.stats import Kind


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
