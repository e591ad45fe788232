"""Whether drafts pay: each request's acceptance against the measured cost of steps that verify.

A step verifies as many drafts for each request, so that the decision is one for the whole step:
it drafts if the tokens that it is expected to yield make up for its time. The expected tokens are
the sum of running products of each request's rate of acceptance, as in Leviathan et al.,
arXiv:2211.17192, equation 1. vLLM's adaptive verification and SGLang's adaptive speculation weigh
the same two. The drafts of a step are all or none, which graphs of one size serve.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median_high, median_low
from weakref import WeakKeyDictionary

from attnmux.transformers.draft.proposers import Proposer
from attnmux.transformers.requests.sequence import SequenceState

WINDOW = 8
"""Tokens that a rate of acceptance follows, steps that a time is the median of, and the most tokens
of a text that one look back reads."""

SHARE = 0.005
"""The most of the decoding time that looking back takes, and that trials may lose: together half of
the 2 % that drafts which do not pay may cost."""

UNMEASURED = 2.0
"""Cost of a step that verifies, in plain steps, before any was timed. Small models on CPUs cost as
much with 7 drafts, GPUs less."""


@dataclass(slots=True)
class Acceptance:
    """How often the drafts of a request are right."""

    rate: float
    """The chance of a draft whose predecessors are right."""
    seen: int = 0
    read: int = 0
    """Leading tokens of the text that are counted."""

    def count(self, hits: int, misses: int) -> None:
        """Count drafts that were right, then those that were wrong."""
        for is_hit in [1.0] * hits + [0.0] * misses:
            self.rate += (is_hit - self.rate) / min(self.seen + 2, WINDOW)
            self.seen += 1

    def expected(self, drafts: int) -> float:
        """Accepted drafts of a chain."""
        rate = self.rate
        return drafts * 1.0 if rate >= 1 else rate * (1 - rate**drafts) / (1 - rate)


@dataclass(slots=True)
class StepTimes:
    """Seconds of the last steps of one kind, of about as many requests."""

    last: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    is_warm: bool = False

    def add(self, seconds: float) -> None:
        """Count a step, unless it is the first, which may compile."""
        if self.is_warm:
            self.last.append(seconds)
        self.is_warm = True


class DraftPace:
    """Decides for each step of B decoding requests whether it drafts. Nothing synchronises."""

    def __init__(self, proposer: Proposer) -> None:
        self._proposer = proposer
        num = proposer.draft_token_num
        self._depth = num - 1 if proposer.topk == 1 else num // 2
        """Drafts of the longest path."""
        self._requests: WeakKeyDictionary[SequenceState, Acceptance] = WeakKeyDictionary()
        self._all = Acceptance(rate=1.0)
        """The acceptance of all requests, from which a new one starts."""
        self._plain: defaultdict[int, StepTimes] = defaultdict(StepTimes)
        self._verify: defaultdict[int, StepTimes] = defaultdict(StepTimes)
        self._seconds = self._looked = self._lost = 0.0
        """Seconds: of all steps, of guesses that no step verified, and lost to plain steps."""

    def drafts(self, states: Sequence[SequenceState], most: int) -> bool:
        """Whether the requests' next step drafts. most: nodes of a tree."""
        budget = SHARE * self._seconds
        if self._looked <= budget:
            self._look_back(states)
        depth, cost = min(self._depth, most - 1), self._cost(len(states))
        expected = sum([self._of(state).expected(depth) for state in states])
        loss = cost - 1 - expected / len(states)
        plain = self._seconds_of_plain(len(states))
        if plain is None:
            return loss <= -cost
        return loss <= 0 or self._lost + loss * plain <= budget

    def count(self, states: Sequence[SequenceState], accepted: Sequence[int], depth: int) -> None:
        """Count the drafts that a step accepted of each request, which has taken them. depth: of
        the longest path."""
        self._depth = max(self._depth, depth)
        for state, hits in zip(states, accepted, strict=True):
            acceptance, misses = self._of(state), int(hits < depth)
            acceptance.count(hits, misses)
            acceptance.read = len(state.token_ids)
            self._all.count(hits, misses)
        plain = self._seconds_of_plain(len(states))
        if plain is not None:
            yielded = 1 + sum(accepted) / len(accepted)
            self._lost = max(0.0, self._lost + (self._cost(len(states)) - yielded) * plain)

    def time(self, batch_size: int, seconds: float, *, drafting: float, verified: bool) -> None:
        """Count a step's time. drafting: what guesses took of it."""
        self._seconds += seconds
        if verified:
            self._verify[_size(batch_size)].add(seconds)
        else:
            self._plain[_size(batch_size)].add(seconds - drafting)
            self._looked += drafting

    def _look_back(self, states: Sequence[SequenceState]) -> None:
        """Follow how guesses would have done without one."""
        for state in states:
            acceptance, end = self._of(state), len(state.token_ids)
            begin = max(acceptance.read, end - WINDOW, 1)
            right = self._proposer.look_back(state, begin) if begin < end else None
            for is_right in right or ():
                acceptance.count(int(is_right), int(not is_right))
            acceptance.read = end

    def _cost(self, batch_size: int) -> float:
        """Time of a step that verifies, in plain steps. If few were timed, `UNMEASURED` counts."""
        plain, verify = self._seconds_of_plain(batch_size), self._verify[_size(batch_size)].last
        if plain is None or not verify:
            return UNMEASURED
        share = len(verify) / (len(verify) + 1)
        return share * max(median_high(verify) / plain, 1.0) + (1 - share) * UNMEASURED

    def _seconds_of_plain(self, batch_size: int) -> float | None:
        last = self._plain[_size(batch_size)].last
        return (median_low(last) or None) if last else None

    def _of(self, state: SequenceState) -> Acceptance:
        found = self._requests.get(state)
        if found is None:
            found = self._requests[state] = Acceptance(rate=self._all.rate)
        return found


def _size(batch_size: int) -> int:
    """Batch sizes up to a power of two count as one."""
    return (batch_size - 1).bit_length()
