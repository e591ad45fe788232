"""Log probabilities of new tokens, by the model's distribution before temperature and top_p."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from attnmux.transformers.requests.sampling import Sampler


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
