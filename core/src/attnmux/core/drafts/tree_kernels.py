"""What a device offers for draft trees: building and sampling them in a launch each."""

from __future__ import annotations

from typing import Protocol

import torch

from attnmux.core.drafts.speculation import AcceptedDrafts, DraftTree
from attnmux.core.drafts.tree_sampling import AcceptThresholds


class TreeKernels(Protocol):
    """What a plugin offers as the shared kernel `draft_trees`. Nothing synchronises, so that graphs
    can hold it."""

    def build(
        self,
        roots: torch.Tensor,
        scores: torch.Tensor,
        tokens: torch.Tensor,
        parents: torch.Tensor,
        draft_token_num: int,
        *,
        topk: int,
    ) -> DraftTree:
        """As `organize_draft_results`, for trees with branches and float32 scores. The tree has its
        `levels`."""

    def sample(
        self,
        tree: DraftTree,
        probs: torch.Tensor,
        coins: torch.Tensor,
        thresholds: AcceptThresholds | None = None,
    ) -> AcceptedDrafts:
        """As `sample_tree_target_only`."""
