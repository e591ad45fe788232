"""From a draft model's candidates to trees whose tokens and links the host knows, in one copy."""

from __future__ import annotations

from dataclasses import replace

import torch

from attnmux.core import DraftTree
from attnmux.transformers.draft.loop import TreeKernels
from attnmux.transformers.draft.paths import DraftCandidates


def drafted_tree(
    roots: torch.Tensor,
    found: DraftCandidates,
    draft_token_num: int,
    *,
    topk: int,
    kernels: TreeKernels | None,
) -> DraftTree:
    """The trees of the best candidates, as `DraftTree.best_of` makes them.

    roots: [B] int64 on the host. found: [B, n] on the draft model's device, which this waits for.
    kernels: of that device. The tree is on the host, but for the `visible` that a kernel made.
    """
    if topk == 1:
        # A draft is at most as likely as the one before it
        drafts = found.tokens[:, : draft_token_num - 1].cpu()
        return DraftTree.chains(torch.cat([roots.unsqueeze(1), drafts], dim=1))
    if kernels is None:
        # A float64 holds every float32, and every id
        columns = (found.scores, found.tokens, found.parents)
        scores, tokens, parents = torch.stack([each.double() for each in columns]).cpu()
        return DraftTree.best_of(
            roots, scores.float(), tokens.long(), parents.long(), draft_token_num, topk=topk
        )
    moved = roots.to(found.tokens.device, non_blocking=True)
    tree = kernels.build(
        moved, found.scores, found.tokens, found.parents, draft_token_num, topk=topk
    )
    tokens, links, levels = torch.stack([tree.draft_tokens, tree.parents, tree.depths]).cpu()
    return replace(tree, draft_tokens=tokens, links=links, levels=levels)
