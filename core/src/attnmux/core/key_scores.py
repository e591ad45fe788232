"""A plugin's own way to score the keys of an indexer: the shared kernel `index_scores`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class IndexRows:
    """A layer's keys as a pool stores them."""

    keys: torch.Tensor
    """[slots, index_head_dim]."""
    scales: torch.Tensor | None
    """[slots, blocks of 128 values] float32; None where keys are stored unchanged."""


class ScoresKeys(Protocol):
    """A device's own way to score keys."""

    def __call__(
        self,
        index_q: torch.Tensor,
        weights: torch.Tensor,
        stored: IndexRows,
        req_to_token: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        scores: torch.Tensor,
    ) -> None:
        """Write scores [T, S] float32 of the keys up to each token's place.

        The score of key s for token t is the sum over the indexer's heads h of
        `weights[t, h] * relu(index_q[t, h] . index_k[s])` (DeepSeek-V3.2-Exp, equation 1).

        index_q: [T, Hi, Di]. weights: [T, Hi]. rows: [R] int64, of the request table req_to_token;
        each is that of T / R tokens, one after another. positions: [T] int64, below S.
        Does not synchronise; shapes are static.
        """
