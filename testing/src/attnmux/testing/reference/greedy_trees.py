"""Which drafts of a tree agree with the target's tokens: the reference for an engine's own code."""

from __future__ import annotations

import torch

from attnmux.parts import AcceptedDrafts, DraftTree


def verify_tree_greedy(tree: DraftTree, target_predict: torch.Tensor) -> AcceptedDrafts:
    """Follow the target's tokens from the root for as long as they are draft tokens.

    target_predict: [B, d] int64, the target's token after each node. It may be sampled: if each
    token is drawn from the target's distribution at its node, the accepted path and the bonus token
    have the distribution of the target's own text. Negative tokens match no draft. Of siblings
    with the same token the first is taken.
    """
    num_tokens = tree.draft_token_num
    order = torch.arange(num_tokens, device=target_predict.device)
    if tree.visible is None:
        follows = (
            tree.draft_tokens[:, 1 : tree.num_nodes] == target_predict[:, : tree.num_nodes - 1]
        )
        count = follows.cumprod(1).sum(dim=1, keepdim=True)
        nodes = torch.where(order <= count, order, -1)
    else:
        parents = tree.parents
        before = target_predict.gather(1, parents.clamp(min=0))
        follows = (parents >= 0) & (tree.draft_tokens == before)
        follows &= ~(tree.siblings() & follows.unsqueeze(1)).any(-1)
        follows[:, 0] = True
        accepted = (follows.unsqueeze(1) | ~tree.visible).all(-1)
        count = accepted.sum(dim=1, keepdim=True) - 1
        nodes = torch.where(accepted, order, num_tokens).sort(dim=1).values
        nodes = torch.where(order <= count, nodes, -1)
    predict = torch.where(order <= count, target_predict.gather(1, nodes.clamp(min=0)), -1)
    return AcceptedDrafts(accept_index=nodes, predict=predict, accept_token_num=count.squeeze(1))
