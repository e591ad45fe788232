"""Choosing the next token from logits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopPLogitsWarper

from attnmux.core.errors import InvalidInput


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How tokens are drawn. The default is greedy.

    Raises InvalidInput for a temperature below 0 or a top_p outside (0, 1].
    """

    temperature: float = 0.0
    """0 takes the most likely token."""
    top_p: float = 1.0
    """Draw from the fewest tokens whose probabilities reach this sum."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise InvalidInput("temperature", came=self.temperature, expected="0 or more")
        if not 0 < self.top_p <= 1:
            raise InvalidInput("top_p", came=self.top_p, expected="above 0, at most 1")
        if not 0 <= self.seed < 2**63:
            raise InvalidInput("seed", came=self.seed, expected="0 to 2**63 - 1")


NOT_A_NUMBER = -1
"""Stands for a token where the logits are NaN or their largest is infinite."""


class Sampler:
    """Draws tokens for requests, each from its own stream of random numbers.

    What a request draws depends on the seed, its index and its own logits, not on which other
    requests share its steps. The numbers come from the host, so that every device draws alike.
    """

    def __init__(self, params: SamplingParams, num_requests: int) -> None:
        self.params = params
        self._warp = LogitsProcessorList()
        self._streams: list[torch.Generator] = []
        if params.temperature == 0:
            return
        # A temperature that float32 rounds to 0 would make NaN of the largest.
        smallest = torch.finfo(torch.float32).tiny
        self._warp.append(TemperatureLogitsWarper(max(float(params.temperature), smallest)))
        if params.top_p < 1:
            self._warp.append(TopPLogitsWarper(params.top_p))
        seeds = torch.Generator().manual_seed(params.seed)
        for seed in torch.randint(2**63 - 1, (num_requests,), generator=seeds).tolist():
            self._streams.append(torch.Generator().manual_seed(seed))

    def __call__(self, logits: torch.Tensor, requests: Sequence[int]) -> torch.Tensor:
        """The next token of each request, [B] int64 on the logits' device.

        logits: [B, vocabulary]. requests: the index of each row's request. A row whose
        largest logit is NaN or infinite yields NOT_A_NUMBER, without a synchronisation here.
        """
        # The largest value is NaN where any is.
        top, best = logits.max(dim=-1)
        tokens = best if self.params.temperature == 0 else self._draw(logits, top, requests)
        return tokens.masked_fill(~top.isfinite(), NOT_A_NUMBER)

    def _draw(
        self, logits: torch.Tensor, top: torch.Tensor, requests: Sequence[int]
    ) -> torch.Tensor:
        # Below 0 no division by a small temperature overflows.
        scores = logits.float() - top.float().unsqueeze(-1)
        scores = self._warp(None, scores)  # type: ignore[arg-type]  # these two read no input_ids
        cumulative = scores.softmax(dim=-1).cumsum(dim=-1, dtype=torch.float64)
        draws = [torch.rand((), generator=self._streams[request]) for request in requests]
        # 24-bit draws below 1 times the total stay below the total: a token is always found.
        draw = torch.stack(draws).to(cumulative.device, torch.float64).unsqueeze(-1)
        return torch.searchsorted(cumulative, draw * cumulative[:, -1:], right=True).squeeze(-1)
