"""What a device offers for draft trees: building, following and sampling them in a launch each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from attnmux.core.choosing.offer.card import TreeMask
from attnmux.core.errors import InvalidInput
from attnmux.core.spec import SpecInput, whole_mask
from attnmux.core.speculation import (
    AcceptedDrafts,
    DraftTree,
    check_num_nodes,
    organize_draft_results,
)
from attnmux.core.tree_masks import mask_bounds, pack_visible
from attnmux.core.tree_sampling import AcceptThresholds


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BuiltTrees:
    """Trees of B requests with d nodes each, and what the step that verifies them reads.

    The names of the links are SGLang's.
    """

    draft_tokens: torch.Tensor
    """[B, d] int64"""
    parents: torch.Tensor
    """[B, d] int64; -1 for the root."""
    positions: torch.Tensor
    """[B, d] int64: the prefix's length plus the node's depth."""
    retrieve_index: torch.Tensor
    """[B, d] int64: as `DraftTree.retrieve_index`."""
    retrieve_next_token: torch.Tensor
    """[B, d] int64: as `DraftTree.retrieve_next_token`."""
    retrieve_next_sibling: torch.Tensor
    """[B, d] int64: as `DraftTree.retrieve_next_sibling`."""
    spec: SpecInput
    """With the mask in the form that was asked for."""


class TreeKernels(Protocol):
    """What a plugin offers as the shared kernel `draft_trees`: the functions named, each in one
    launch. Nothing synchronises, so that graphs can hold it."""

    def build(
        self,
        roots: torch.Tensor,
        scores: torch.Tensor,
        tokens: torch.Tensor,
        parents: torch.Tensor,
        draft_token_num: int,
        seq_lens: torch.Tensor,
        *,
        topk: int,
        form: TreeMask = "qlen_only",
        total: int | None = None,
    ) -> BuiltTrees:
        """As `build_trees`."""

    def verify(self, tree: DraftTree, target_predict: torch.Tensor) -> AcceptedDrafts:
        """As `verify_tree_greedy`."""

    def sample(
        self,
        tree: DraftTree,
        probs: torch.Tensor,
        coins: torch.Tensor,
        thresholds: AcceptThresholds | None = None,
    ) -> AcceptedDrafts:
        """As `sample_tree_target_only`."""


def build_trees(
    roots: torch.Tensor,
    scores: torch.Tensor,
    tokens: torch.Tensor,
    parents: torch.Tensor,
    draft_token_num: int,
    seq_lens: torch.Tensor,
    *,
    topk: int,
    form: TreeMask = "qlen_only",
    total: int | None = None,
) -> BuiltTrees:
    """The trees of `organize_draft_results`, with the mask in a form and the links of SGLang.

    roots, scores, tokens, parents, draft_token_num: as there; float32 scores. seq_lens: [B] int32,
    the prefixes. topk: above 1. total: values of a whole mask, or more; those after the last tree
    are True. Raises InvalidInput for too many nodes, and for a whole mask without `total`.
    """
    check_build(scores, draft_token_num, form, total)
    tree = organize_draft_results(
        roots, scores, tokens, parents, draft_token_num, topk=max(topk, 2)
    )
    assert tree.visible is not None
    masks: dict[str, torch.Tensor]
    if form == "qlen_only":
        masks = {"visible": tree.visible}
    elif form == "qlen_only_bitpacking":
        masks = {"visible_bits": pack_visible(tree.visible)}
    else:
        masks = {
            "custom_mask": whole_mask(tree.visible, seq_lens, total=total),
            "mask_indptr": mask_bounds(seq_lens, draft_token_num),
        }
    return BuiltTrees(
        draft_tokens=tree.draft_tokens,
        parents=tree.parents,
        positions=tree.depths + seq_lens.long().unsqueeze(1),
        retrieve_index=tree.retrieve_index,
        retrieve_next_token=tree.retrieve_next_token,
        retrieve_next_sibling=tree.retrieve_next_sibling,
        spec=SpecInput(draft_token_num=draft_token_num, topk=topk, **masks),
    )


def check_build(
    scores: torch.Tensor, draft_token_num: int, form: TreeMask, total: int | None
) -> None:
    """Raises InvalidInput as `build_trees` does."""
    check_num_nodes(draft_token_num, scores.shape[1])
    if form == "full" and total is None:
        raise InvalidInput("total", got=None, expected="the values of a whole mask, or more")
