"""Draft trees on a device: built and sampled in one launch each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attnmux.parts import AcceptedDrafts, AcceptThresholds, DraftTree, sample_tree_target_only
from attnmux.triton.kernels import trees as kernels
from attnmux.triton.launches.bound_kernel import BoundKernel, Launcher
from attnmux.triton.launches.shapes import next_power_of_2

if TYPE_CHECKING:
    from attnmux.core import BackendContext

MOST_NODES = 128
"""Nodes of a tree whose links fit into a program's registers. Plain operations take larger ones."""
SAMPLED_BLOCK = 4096
"""Tokens of the vocabulary that a program reads at a time."""


class TritonTrees:
    """`TreeKernels`. Keeps the compiled kernels, by the number of nodes."""

    def __init__(self) -> None:
        launcher = Launcher()
        self._build = BoundKernel(
            launcher,
            kernels.build_trees,
            {},
            tensors=("roots", "scores", "tokens", "parents", "links", "visible"),
            numbers=("NODES", "BLOCK_D", "BLOCK_N"),
            counts=("batch_size", "num_candidates"),
            options={"num_warps": 4},
        )
        self._sample = BoundKernel(
            launcher,
            kernels.sample_trees,
            {"BLOCK": SAMPLED_BLOCK},
            tensors=("tokens", "visible", "probs", "coins", "accepted"),
            numbers=("single", "acc", "NODES", "IS_CHAIN", "BLOCK_D"),
            counts=("num_nodes", "vocabulary"),
            options={"num_warps": 8},
        )

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
        """See `DraftTree.best_of`."""
        num, (batch_size, num_candidates) = draft_token_num, scores.shape
        DraftTree.check_num_nodes(num, num_candidates)
        if num > MOST_NODES or not batch_size or topk == 1:
            return DraftTree.best_of(roots, scores, tokens, parents, num, topk=topk)
        links = torch.empty((3, batch_size, num), dtype=torch.int64, device=scores.device)
        shape = (batch_size, num, num)
        visible = torch.empty(shape, dtype=torch.bool, device=scores.device)
        given = (tensor.contiguous() for tensor in (roots, scores, tokens, parents))
        block_n = min(next_power_of_2(max(num_candidates, 8)), 64)
        self._build(
            (batch_size, 1, 1),
            (*given, links, visible.view(torch.uint8)),
            (num, _block(num), block_n),
            (batch_size, num_candidates),
        )
        made = links.unbind()
        return DraftTree(
            draft_tokens=made[0],
            links=made[1],
            visible=visible,
            topk=topk,
            num_nodes=num,
            levels=made[2],
        )

    def sample(
        self,
        tree: DraftTree,
        probs: torch.Tensor,
        coins: torch.Tensor,
        thresholds: AcceptThresholds | None = None,
    ) -> AcceptedDrafts:
        """See core's `sample_tree_target_only`."""
        tree.check_sampling(probs, coins)
        batch_size, num = tree.draft_tokens.shape
        if num > MOST_NODES or not batch_size:
            return sample_tree_target_only(tree, probs, coins, thresholds)
        limits = thresholds or AcceptThresholds()
        accepted = tree.draft_tokens.new_empty((batch_size, 2 * num + 1))
        is_chain = tree.visible is None
        tokens = tree.draft_tokens.contiguous()
        self._sample(
            (batch_size, 1, 1),
            (tokens, _bytes(tree), probs.contiguous(), coins.contiguous(), accepted),
            (limits.single, limits.acc, num, is_chain, _block(num)),
            (tree.num_nodes, probs.shape[1]),
        )
        return _paths(accepted, num)


def _block(num: int) -> int:
    """Lanes of a program; at least a byte of bits."""
    return max(next_power_of_2(num), 8)


def _bytes(tree: DraftTree) -> torch.Tensor | None:
    return None if tree.visible is None else tree.visible.contiguous().view(torch.uint8)


def _paths(accepted: torch.Tensor, num: int) -> AcceptedDrafts:
    """Views of a launch's results."""
    return AcceptedDrafts(
        accept_index=accepted[:, :num],
        predict=accepted[:, num : 2 * num],
        accept_token_num=accepted[:, 2 * num],
    )


def make_trees(context: BackendContext) -> TritonTrees:
    """The kernels, each tried once on the context's device."""
    made, device = TritonTrees(), context.device
    ids = torch.zeros((1, 2), dtype=torch.int64, device=device)
    tree = made.build(ids[:, 0], ids.float(), ids, ids - 1, 3, topk=2)
    coins = torch.zeros((1, 3), dtype=torch.float64, device=device)
    made.sample(tree, torch.ones((3, 1), device=device), coins)
    return made
