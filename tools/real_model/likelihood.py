"""How likely a model finds a text, and how far its distributions are from exact ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Likelihood:
    log_probs: torch.Tensor
    """[n, vocabulary] float32: after each token of the text but the last."""
    perplexity: float
    divergence: float
    """The mean of KL(exact || found) over the tokens, in nats; 0 for the exact one."""
    same: float
    """The share of tokens after which the likeliest token is the exact one's."""


def likelihood(
    logits: torch.Tensor, ids: list[int], exact: torch.Tensor | None = None
) -> Likelihood:
    """logits [n, vocabulary] after each of the tokens `ids`; exact: the `log_probs` to compare
    with."""
    found = torch.log_softmax(logits[:-1].float(), dim=-1)
    text = torch.tensor(ids[1:], device=found.device)
    nats = -found[torch.arange(len(text), device=found.device), text]
    exact = found if exact is None else exact
    divergence = (exact.exp() * (exact - found)).sum(-1)
    return Likelihood(
        log_probs=found,
        perplexity=float(nats.mean().exp()),
        divergence=float(divergence.mean()),
        same=float((found.argmax(-1) == exact.argmax(-1)).float().mean()),
    )
