"""How a request's tokens are drawn. Importing this module imports no torch."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass, replace
from numbers import Integral, Real

from attnmux.core import InvalidInput


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How a request's tokens are drawn. The default is greedy.

    Raises InvalidInput for a temperature below 0, a top_p outside (0, 1], and values that are no
    numbers.
    """

    temperature: float = 0.0
    """0 takes the most likely token."""
    top_p: float = 1.0
    """Draw from the fewest tokens whose probabilities reach this sum."""
    seed: int = 0
    logprobs: int | None = None
    """Return each token's log probability, and those of so many of the likeliest tokens; None: no
    log probabilities."""

    def __post_init__(self) -> None:
        for name, kind in (("temperature", Real), ("top_p", Real), ("seed", Integral)):
            if not isinstance(value := getattr(self, name), kind):
                words = "a whole number" if kind is Integral else "a number"
                raise InvalidInput(name, got=repr(value), expected=words)
        if not 0 <= self.temperature <= sys.float_info.max:
            raise InvalidInput("temperature", got=self.temperature, expected="0 or more, finite")
        if not 0 < self.top_p <= 1:
            raise InvalidInput("top_p", got=self.top_p, expected="above 0, at most 1")
        if not 0 <= self.seed < 2**63:
            raise InvalidInput("seed", got=self.seed, expected="0 to 2**63 - 1")
        asked: object = 0 if self.logprobs is None else self.logprobs
        if not isinstance(asked, int) or asked < 0:
            raise InvalidInput("logprobs", got=repr(asked), expected="0 or more, or None")

    def for_each(self, num_requests: int) -> list[SamplingParams]:
        """The same parameters for many requests, each with a seed that is derived from this one."""
        torch = importlib.import_module("torch")  # here: the command line reads this module first
        generator = torch.Generator().manual_seed(self.seed)
        seeds = torch.randint(2**63 - 1, (num_requests,), generator=generator)
        return [replace(self, seed=seed) for seed in seeds.tolist()]
