"""Which drafts a step accepts where it may change the distribution of sampled text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from attnmux.core import AcceptThresholds, DraftTree, sample_tree_target_only
from attnmux.transformers.sampling import Draws, distributions


def sampled_paths(
    tree: DraftTree, logits: torch.Tensor, draws: Sequence[Draws], thresholds: AcceptThresholds
) -> tuple[list[list[int]], list[list[int]]]:
    """The nodes of each request's path from the root on, and the tokens that it says: those of the
    path's other nodes, and the one drawn after them.

    tree: on the host. logits: [B * d, vocabulary], after each node. draws: of each node; a node's
    number decides about its children, and draws the token after it where none is accepted.
    Waits for the device.
    """
    device, links = logits.device, tree.links
    coins = torch.tensor([each.draw() for each in draws], dtype=torch.float64)
    found = sample_tree_target_only(
        replace(
            tree,
            draft_tokens=tree.draft_tokens.to(device),
            links=None if links is None else links.to(device),
        ),
        distributions(logits, draws),
        coins.view_as(tree.draft_tokens).to(device),
        thresholds,
    )
    nodes, tokens = torch.stack([found.accept_index, found.predict]).cpu().tolist()
    counts = [sum(node >= 0 for node in path) for path in nodes]
    paths = [path[:count] for path, count in zip(nodes, counts, strict=True)]
    return paths, [said[:count] for said, count in zip(tokens, counts, strict=True)]
