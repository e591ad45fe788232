"""Verifying draft trees by the target's probabilities, with thresholds that accept more drafts.

At each node the request has a number in [0, 1). Its children are looked at in order, and the sum of
their probabilities grows. A child is accepted if the number is below sum / threshold_acc, or if its
own probability reaches threshold_single. If none is, the next token is drawn from the rest of the
target's distribution, without the node's children. With both thresholds at 1 the text has the
target's own distribution, since each child is accepted with its probability.

The rule is that of SGLang's `tree_speculative_sampling_target_only`, which draws the last token
with a number of its own. Here it takes the node's number again: if no child is accepted it is
uniform over [sum / threshold_acc, 1), and is stretched to [0, 1).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attnmux.core import InvalidInput
from attnmux.parts.speculation import AcceptedDrafts, DraftTree


@dataclass(frozen=True, kw_only=True, slots=True)
class AcceptThresholds:
    """Which drafts of sampled requests are accepted. The default keeps the distribution.

    Raises InvalidInput for numbers outside (0, 1].
    """

    single: float = 1.0
    """The probability from which a draft is accepted, whatever was drawn."""
    acc: float = 1.0
    """Divides the sum of a draft's probability and those of the siblings before it."""

    def __post_init__(self) -> None:
        for name, value in (("single", self.single), ("acc", self.acc)):
            if not 0 < value <= 1:
                raise InvalidInput(f"threshold_{name}", got=value, expected="above 0, at most 1")

    @property
    def exact(self) -> bool:
        """Whether the target's distribution stays as it is."""
        return self.single == self.acc == 1


def sample_tree_target_only(
    tree: DraftTree,
    probs: torch.Tensor,
    coins: torch.Tensor,
    thresholds: AcceptThresholds | None = None,
) -> AcceptedDrafts:
    """Accept a path of each tree by the target's probabilities, and draw the token after it.

    probs: [B * d, vocabulary] float32, the target's distribution after each node. coins: [B, d]
    float64 in [0, 1), one number a node; those of a path must be independent. thresholds: None for
    the exact ones. Of siblings with the same token the first counts. `predict` holds the accepted
    drafts and the drawn token; the drawn one is -1 if the probabilities are no numbers, or
    nothing is left of them. Does not synchronise.
    Raises InvalidInput for other shapes and dtypes.
    """
    tree.check_sampling(probs, coins)
    limits = thresholds or AcceptThresholds()
    tokens, parents = tree.draft_tokens, tree.parents
    batch_size, num = tokens.shape
    device = tokens.device
    rows = torch.arange(batch_size, device=device)
    probs = probs.view(batch_size, num, probs.shape[1])
    repeats = (tree.siblings() & (tokens.unsqueeze(2) == tokens.unsqueeze(1))).any(-1)
    within = tokens.clamp(0, probs.shape[2] - 1)
    counts = (within == tokens) & ~repeats
    at = torch.zeros_like(rows)
    path = torch.full_like(tokens, -1)
    predict, going = path.clone(), torch.ones_like(rows, dtype=torch.bool)
    count, low = torch.zeros_like(rows), coins.new_zeros(batch_size)
    for step in range(num):
        path[:, step] = torch.where(going, at, -1)
        children = (parents == at.unsqueeze(1)) & counts & going.unsqueeze(1)
        chance = probs[rows, at].gather(1, within).double()
        chance = torch.where(children, chance, 0)
        reached = chance.cumsum(1) / limits.acc
        coin = coins.gather(1, at.unsqueeze(1))
        accepts = children & ((coin < reached) | (chance >= limits.single))
        finds = accepts.any(-1)
        low = torch.where(going & ~finds, reached[:, -1], low)
        child = accepts.int().argmax(-1)
        taken = tokens.gather(1, child.unsqueeze(1)).squeeze(1)
        predict[:, step] = torch.where(finds, taken, -1)
        going = going & finds
        count += finds
        at = torch.where(finds, child, at)
    coin = coins.gather(1, at.unsqueeze(1)).squeeze(1)
    left = probs[rows, at].double()
    rejected = (parents == at.unsqueeze(1)) & counts
    hides = torch.zeros_like(left).scatter_add_(1, within, rejected.double())
    drawn = _draw(torch.where(hides > 0, 0, left), (coin - low) / (1 - low))
    predict.scatter_(1, count.unsqueeze(1), drawn.unsqueeze(1))
    return AcceptedDrafts(accept_index=path, predict=predict, accept_token_num=count)


def _draw(weights: torch.Tensor, coins: torch.Tensor) -> torch.Tensor:
    """[B] int64: a token of each row [B, vocabulary] float64, which needs not sum to 1; -1 if
    nothing can be drawn. coins: [B] float64 in [0, 1)."""
    sums = weights.cumsum(1)
    total = sums[:, -1:]
    above = sums > coins.clamp(0, 1).unsqueeze(1) * total
    # The last one that can be drawn, should rounding leave none above
    last = torch.where(weights > 0, torch.arange(weights.shape[1], device=weights.device), -1)
    token = torch.where(above.any(1), above.int().argmax(1), last.amax(1))
    return torch.where(total.squeeze(1) > 0, token, -1)
