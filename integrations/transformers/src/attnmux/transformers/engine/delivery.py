"""The tokens of a step on their way to its requests. Some requests end with them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from attnmux.transformers.engine.outputs import OutputQueue
from attnmux.transformers.engine.request import FinishReason, LiveRequest, Plan
from attnmux.transformers.requests.sampling import NOT_A_NUMBER
from attnmux.transformers.run.stats import EngineStats


class Delivery:
    """Gives the requests of one step their new tokens, and ends those that are complete.

    Make it while the device runs the step: little is left to do for each request once the tokens
    are known, unless one of them may end a request.
    """

    def __init__(self, plan: Plan, outputs: OutputQueue, stats: EngineStats) -> None:
        self._plan, self._outputs, self._stats = plan, outputs, stats
        requests = plan.sampled
        self._takers = [(request, request.state.token_ids) for request in requests]
        self._least_left = min([request.num_remaining for request in requests], default=0)
        self._stop_ids = frozenset[int]().union(*{request.stop_ids for request in requests})
        self._listens = any([request.on_text is not None for request in requests])
        self._draws = any([request.sampler.draws_by is not None for request in requests])
        self.is_whole = False
        """Whether every request took all of its tokens."""
        self.has_ended = False
        """Whether one of them ended with its tokens."""

    def give(self, tokens: Sequence[list[int]], *, any_ended: bool) -> int:
        """Append the tokens to their requests. Returns their number.

        tokens: of each of `plan.requests`; those after a request's last one are dropped. any_ended:
        whether some of the requests may have ended before.
        """
        all_tokens, takers = list(chain.from_iterable(tokens)), self._takers
        self.is_whole = (
            not any_ended
            and max(map(len, tokens)) < self._least_left
            and NOT_A_NUMBER not in all_tokens
            and self._stop_ids.isdisjoint(all_tokens)
        )
        if not self.is_whole:
            return self._give_each(tokens)
        self._outputs.add_all(takers, tokens, listens=self._listens)
        if self._draws:
            for (request, _), new in zip(takers, tokens, strict=False):
                for _ in new:
                    _draw(request)
        return len(all_tokens) - (len(tokens) - len(takers))

    def _give_each(self, tokens: Sequence[list[int]]) -> int:
        num_sampled, num_new = len(self._plan.sampled), 0
        for place, (request, new) in enumerate(zip(self._plan.requests, tokens, strict=True)):
            for token in new:
                if request.ended:
                    request.is_sound &= token != NOT_A_NUMBER
                    break
                if place < num_sampled or token == NOT_A_NUMBER:
                    self._give(request, token)
                    num_new += 1
        return num_new

    def _give(self, request: LiveRequest, token: int) -> None:
        reason: FinishReason | None = None
        if token == NOT_A_NUMBER:
            request.is_sound = False
            reason = "error"
        elif token in request.stop_ids:
            reason = "stop"
        elif request.num_remaining <= 1:
            reason = "length"
        self.has_ended |= reason is not None
        self._outputs.add(request, token, reason)
        if token != NOT_A_NUMBER:
            _draw(request)
        self._stats.finished += reason is not None


def _draw(request: LiveRequest) -> None:
    """Count the random number of a token that was taken."""
    if request.sampler.draws_by is not None:
        request.sampler.draw()
