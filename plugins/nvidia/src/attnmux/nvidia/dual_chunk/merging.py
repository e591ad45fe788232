"""Attention over several sets of keys as attention over all of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def merged(
    outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each set's output weighs as much as its keys have of the softmax's denominator.

    outs: [T, H, D] of each set. lses: [T, H] float32, natural logarithms, -inf without keys.
    Returns out [T, H, D] and lse [T, H], float32; a row without any keys has out 0 and lse -inf.
    """
    of_sets = torch.stack(tuple(lses))
    lse = of_sets.logsumexp(0)
    # exp(-inf - -inf) is NaN; a row without keys has weights 0.
    weights = (of_sets - lse).exp_().masked_fill_(lse.isneginf(), 0).unsqueeze(-1)
    out = weights[0] * outs[0]
    for weight, of_set in zip(weights[1:], outs[1:], strict=True):
        out.addcmul_(weight, of_set.float())
    return out, lse
