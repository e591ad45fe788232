"""Counters of an engine, and the host's time by part of a step."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from typing_extensions import Self

Part = Literal[
    "schedule", "draft", "allocate", "metadata", "launch", "sample", "wait", "commit", "stream"
]

PARTS: Mapping[Part, str] = {
    "schedule": "admission, room and retraction",
    "draft": "the proposer's guesses, with the wait for a draft model",
    "allocate": "slots, the request table and the batch's tensors",
    "metadata": "the backend's host work before a step",
    "launch": "the model's call, or the graph's replay",
    "sample": "launching the choice of tokens",
    "wait": "waiting for the device",
    "commit": "appending tokens, ending requests, freeing memory",
    "stream": "text and callbacks",
}
"""The parts of a step in order. The host works in all of them but "wait"."""

Kind = Literal["extend", "mixed", "decode"]


class Laps:
    """A stopwatch over the parts of one step."""

    def __init__(self) -> None:
        self.seconds: dict[Part, float] = dict.fromkeys(PARTS, 0.0)
        self._last = time.perf_counter()

    def lap(self, part: Part) -> None:
        """Count the time since the last call to `part`."""
        now = time.perf_counter()
        self.seconds[part] += now - self._last
        self._last = now


class Counters:
    """The base of a dataclass whose fields are numbers, or counters themselves."""

    def add(self, other: Self) -> None:
        """Count another rank's work."""
        for counter in fields(self):  # type: ignore[arg-type]  # a dataclass
            mine, theirs = getattr(self, counter.name), getattr(other, counter.name)
            if isinstance(mine, int):
                setattr(self, counter.name, mine + theirs)
            else:
                mine.add(theirs)


@dataclass(kw_only=True, slots=True)
class StepStats:
    """Steps of one kind."""

    steps: int = 0
    prompt_tokens: int = 0
    """Prompt tokens that ran. Those of a retracted request count again."""
    new_tokens: int = 0
    """Tokens sampled."""
    parts: dict[Part, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    """Seconds by part."""

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    def add(self, other: StepStats) -> None:
        """Count the steps that another rank ran meanwhile. Seconds are those of the slower one."""
        self.steps += other.steps
        self.prompt_tokens += other.prompt_tokens
        self.new_tokens += other.new_tokens
        if other.seconds > self.seconds:
            self.parts = dict(other.parts)


@dataclass(kw_only=True, slots=True)
class DraftStats(Counters):
    """Speculative decoding. A request counts once for each step that verified its drafts."""

    requests: int = 0
    draft_tokens: int = 0
    """Drafts that were verified, the roots not counted."""
    accepted_tokens: int = 0
    """Drafts that the target model accepted."""
    rested: int = 0
    """Requests in steps without drafts, which would not have paid."""

    def count(self, requests: int, drafts_each: int, accepted: int) -> None:
        """Count a step."""
        self.requests += requests
        self.draft_tokens += requests * drafts_each
        self.accepted_tokens += accepted

    @property
    def accepted_per_step(self) -> float:
        """Accepted drafts of a request in a step. The step yields one token more."""
        return self.accepted_tokens / self.requests if self.requests else 0.0


@dataclass(kw_only=True, slots=True)
class EngineStats(Counters):
    """Counts since the engine began, or since the last `reset`."""

    extend: StepStats = field(default_factory=StepStats)
    """Steps over prompts alone."""
    mixed: StepStats = field(default_factory=StepStats)
    """Steps over prompts and decoding requests."""
    decode: StepStats = field(default_factory=StepStats)
    """Steps over decoding requests alone."""
    drafts: DraftStats = field(default_factory=DraftStats)
    """Decode steps with drafts; they count as `decode` too."""
    prompt_tokens: int = 0
    """Tokens of the admitted prompts."""
    reused_tokens: int = 0
    """The part of them whose K and V were in the cache already."""
    finished: int = 0
    aborted: int = 0
    """By `Engine.abort`, or by a step that failed."""
    retractions: int = 0
    evicted_tokens: int = 0

    def count(self, kind: Kind, prompt_tokens: int, new_tokens: int, laps: Laps) -> None:
        """Count a step."""
        of_kind = {"extend": self.extend, "mixed": self.mixed, "decode": self.decode}[kind]
        of_kind.steps += 1
        of_kind.prompt_tokens += prompt_tokens
        of_kind.new_tokens += new_tokens
        for part, seconds in laps.seconds.items():
            of_kind.parts[part] += seconds

    def reset(self) -> None:
        """Count from zero."""
        fresh = EngineStats()
        for counter in fields(self):
            setattr(self, counter.name, getattr(fresh, counter.name))
