"""Choosing the next token from logits."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopPLogitsWarper

from attnmux.transformers.requests.sampling_params import SamplingParams

NOT_A_NUMBER = -1
"""Stands for a token if the logits are NaN or their largest is infinite."""


class Draws(Protocol):
    """How one row of logits is sampled."""

    draws_by: tuple[float, float] | None
    """Temperature and top_p; None for the most likely token."""

    def scores(self, logits: torch.Tensor) -> torch.Tensor:
        """[n, vocabulary] float32: the logits to sample from, for rows with these parameters."""

    def draw(self) -> float:
        """The row's number in [0, 1)."""


class Sampler:
    """One request's parameters and its stream of random numbers.

    A request's tokens depend on its seed and its own logits, and not on the other requests of its
    steps. The random numbers come from the host, so that all devices draw the same.
    """

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        self.draws_by: tuple[float, float] | None = None
        """Temperature and top_p; None for the most likely token."""
        self._warp = LogitsProcessorList()
        self._stream = random.Random(params.seed)
        self._ahead: deque[float] = deque()
        """Numbers that were looked at and not drawn."""
        if params.temperature == 0:
            return
        self.draws_by = (params.temperature, params.top_p)
        # A temperature that float32 rounds to 0 would make NaN of the largest.
        smallest = torch.finfo(torch.float32).tiny
        self._warp.append(TemperatureLogitsWarper(max(float(params.temperature), smallest)))
        if params.top_p < 1:
            self._warp.append(TopPLogitsWarper(params.top_p))

    def scores(self, logits: torch.Tensor) -> torch.Tensor:
        """[n, vocabulary] float32: the logits to sample from, for requests with these
        parameters."""
        warped = self._warp(None, logits)  # type: ignore[arg-type]  # these two read no input_ids
        return warped.float()

    def draw(self) -> float:
        """The request's next number in [0, 1)."""
        return self._ahead.popleft() if self._ahead else self._stream.random()

    def peek(self, place: int) -> float:
        """The number that `draw` returns after `place` other ones."""
        while len(self._ahead) <= place:
            self._ahead.append(self._stream.random())
        return self._ahead[place]


class Upcoming:
    """A sampler some tokens later. It draws the number of that token and leaves it to the sampler.

    A draft token whose place in the text is known is sampled with it: whether or not it was
    drafted, a request then draws the same text.
    """

    def __init__(self, sampler: Sampler, place: int) -> None:
        """place: tokens between the sampler's next one and this one."""
        self.draws_by = sampler.draws_by
        self.scores = sampler.scores
        self._sampler, self._place = sampler, place

    def draw(self) -> float:
        return self._sampler.peek(self._place)


def upcoming(samplers: Sequence[Sampler], places: Iterable[Sequence[int]]) -> list[Draws]:
    """How tokens at some places of each request are sampled, request by request; empty if no
    request draws."""
    if all([sampler.draws_by is None for sampler in samplers]):
        return []
    pairs = zip(samplers, places, strict=True)
    return [Upcoming(sampler, place) for sampler, own in pairs for place in own]


def sample(logits: torch.Tensor, samplers: Sequence[Draws]) -> torch.Tensor:
    """The next token of each request, [B] int64 on the logits' device.

    logits: [B, vocabulary]. samplers: of each row's request; none if no row is drawn. A row whose
    largest logit is NaN or infinite yields NOT_A_NUMBER. Nothing here waits for the device.
    """
    # The largest value is NaN where any is.
    top, tokens = logits.max(dim=-1)
    for rows in _alike(samplers):
        if len(rows) == len(samplers):
            tokens = _draw(logits, top, samplers)
            break
        places = torch.tensor(rows).to(logits.device, non_blocking=True)
        drawn = _draw(logits[places], top[places], [samplers[row] for row in rows])
        tokens = tokens.index_copy(0, places, drawn)
    # Three operations; `isfinite` alone is four.
    return torch.where(top.abs() < math.inf, tokens, NOT_A_NUMBER)


def distributions(logits: torch.Tensor, samplers: Sequence[Draws]) -> torch.Tensor:
    """[B, vocabulary] float32: the distribution from which each row is drawn. All weight is on the
    most likely token of a row that is not drawn; rows whose largest logit is NaN or infinite are
    NaN.

    As `sample`, which draws from the same.
    """
    top, tokens = logits.max(dim=-1)
    found = torch.zeros_like(logits, dtype=torch.float32).scatter_(1, tokens.unsqueeze(1), 1)
    for rows in _alike(samplers):
        places = torch.tensor(rows).to(logits.device, non_blocking=True)
        found.index_copy_(0, places, _chances(logits[places], top[places], samplers[rows[0]]))
    return found.masked_fill_(~(top.abs() < math.inf).unsqueeze(1), math.nan)


def _alike(samplers: Sequence[Draws]) -> Iterable[list[int]]:
    """The rows that are drawn, those with the same parameters together."""
    groups: dict[tuple[float, float], list[int]] = {}
    for row, sampler in enumerate(samplers):
        if sampler.draws_by is not None:
            groups.setdefault(sampler.draws_by, []).append(row)
    return groups.values()


def _chances(logits: torch.Tensor, top: torch.Tensor, sampler: Draws) -> torch.Tensor:
    """[n, vocabulary] float32: the probabilities of rows with a sampler's parameters."""
    # Below 0 no division by a small temperature overflows.
    return sampler.scores(logits.float() - top.float().unsqueeze(-1)).softmax(dim=-1)


def _draw(logits: torch.Tensor, top: torch.Tensor, samplers: Sequence[Draws]) -> torch.Tensor:
    """Tokens [n] of requests whose parameters, seeds apart, are the same."""
    cumulative = _chances(logits, top, samplers[0]).cumsum(dim=-1, dtype=torch.float64)
    draws = torch.tensor([sampler.draw() for sampler in samplers], dtype=torch.float64)
    # Numbers of 53 bits below 1 times the total stay below the total: a token is always found.
    draw = draws.to(cumulative.device, non_blocking=True).unsqueeze(-1)
    return torch.searchsorted(cumulative, draw * cumulative[:, -1:], right=True).squeeze(-1)


class TokenLogprobs(NamedTuple):
    """Logprobs of one new token."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """The likeliest tokens with theirs, the likeliest first; as many as the request wants."""


class Logprobs:
    """Logprobs of a step's rows, on their way to the host."""

    def __init__(self, logits: torch.Tensor, tokens: torch.Tensor, most: int) -> None:
        """logits: [B, vocabulary]. tokens: [B] int64, what each row yields. most: likeliest tokens
        of a row."""
        rows = logits.float().log_softmax(dim=-1)
        of_tokens = rows.gather(1, tokens.clamp(min=0).unsqueeze(1))
        top, ids = rows.topk(min(most, rows.shape[1]), dim=-1)
        self._values = torch.cat([of_tokens, top], dim=1).to("cpu", non_blocking=True)
        self._ids = ids.to("cpu", non_blocking=True)

    @classmethod
    def wanted(
        cls, samplers: Sequence[Sampler], logits: torch.Tensor, tokens: torch.Tensor
    ) -> Logprobs | None:
        """None if no request asks for any. samplers: of the first rows."""
        counts = [
            sampler.params.logprobs for sampler in samplers if sampler.params.logprobs is not None
        ]
        return cls(logits, tokens, max(counts)) if counts else None

    def of(self, row: int, token: int, most: int) -> TokenLogprobs:
        """A row's token, once the device has run the step."""
        logprob, *top = self._values[row].tolist()
        ids = self._ids[row].tolist()
        return TokenLogprobs(token, logprob, tuple(zip(ids[:most], top[:most], strict=True)))
