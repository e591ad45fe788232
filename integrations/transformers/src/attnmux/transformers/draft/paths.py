"""The likeliest paths of a draft model: which tokens may follow, and which paths go on.

B requests have K paths each, `topk`. The first step's candidates are the K likeliest tokens after
the root. Each later step proposes the K likeliest tokens after each path, and the K best of these
K * K candidates are the paths that go on. A path's score is the logarithm of its probability.
The algorithm is that of SGLang's EAGLE worker. Nothing here synchronises.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DraftCandidates:
    """Tokens that may follow: [B, K, K] those after each path, [B, n] those of a whole draft.

    A request's candidates are numbered: the K of the first step, then the K * K of each later one,
    those after one path together.
    """

    scores: torch.Tensor
    """float32; at most the parent's."""
    tokens: torch.Tensor
    """int64"""
    parents: torch.Tensor
    """int64: the number of the candidate before; -1 for the root."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DraftPaths:
    """The paths that go on, [B, K] each."""

    scores: torch.Tensor
    """float32"""
    tokens: torch.Tensor
    """int64: the last token of each path."""
    before: torch.Tensor
    """int64: the one of the K paths of the step before that each path continues."""
    numbers: torch.Tensor
    """int64: the last token's number among the candidates."""

    @classmethod
    def start(cls, scores: torch.Tensor, tokens: torch.Tensor) -> DraftPaths:
        """Paths of one token after the root, [B, K] each as `likeliest` returns them."""
        numbers = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        return cls(scores=scores, tokens=tokens, before=numbers, numbers=numbers)

    def grow(
        self, logits: torch.Tensor, num_candidates: int, *, token_ids: torch.Tensor | None = None
    ) -> tuple[DraftPaths, DraftCandidates]:
        """The paths with a token more, and the candidates [B, K, K] after each path.

        logits: [B * K, vocabulary] after each path. num_candidates: those of all steps before.
        token_ids: as in `likeliest`.
        """
        batch_size, topk = self.tokens.shape
        found = likeliest(logits, topk, token_ids=token_ids)
        scores, tokens = (tensor.view(batch_size, topk, topk) for tensor in found)
        scores = scores + self.scores.unsqueeze(2)
        parents = self.numbers.unsqueeze(2).expand_as(tokens)
        best, places = scores.flatten(1).topk(topk, dim=1)
        paths = DraftPaths(
            scores=best,
            tokens=tokens.flatten(1).gather(1, places),
            before=places // topk,
            numbers=places + num_candidates,
        )
        return paths, DraftCandidates(scores=scores, tokens=tokens, parents=parents)


def likeliest(
    logits: torch.Tensor, topk: int, *, token_ids: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The likeliest tokens after each row, the likeliest first: their log-probabilities [n, K]
    float32, at most 0, and their ids [n, K] int64.

    logits: [n, vocabulary]. Those that are no numbers have no chance. topk: K, at most the
    vocabulary. token_ids: [vocabulary] int64, the ids of tokens that a draft model counts in its
    own way; None: their places.
    """
    scores = torch.log_softmax(logits.float(), dim=-1)
    scores = scores.nan_to_num(nan=-torch.inf, neginf=-torch.inf).clamp(max=0)
    best, tokens = scores.topk(topk, dim=-1)
    return best, tokens if token_ids is None else token_ids[tokens]
