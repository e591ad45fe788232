"""Draft trees on a device: built, followed and sampled in one launch each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attnmux.core import (
    AcceptedDrafts,
    AcceptThresholds,
    BuiltTrees,
    DraftTree,
    SpecInput,
    build_trees,
    check_build,
    check_sampling,
    sample_tree_target_only,
    verify_tree_greedy,
)
from attnmux.triton.bound_kernel import BoundKernel, Launcher
from attnmux.triton.kernels import trees as kernels
from attnmux.triton.shapes import next_power_of_2

if TYPE_CHECKING:
    from attnmux.core import BackendContext
    from attnmux.core.choosing.offer.card import TreeMask

MOST_NODES = 128
"""Nodes of a tree whose links fit into a program's registers. Plain operations take larger ones."""
FORMS: dict[TreeMask, int] = {"qlen_only": 0, "qlen_only_bitpacking": 1, "full": 2}
"""FORM of `build_trees`."""
BLOCK = 1024
"""Values of a mask that a program writes at a time."""
SAMPLED_BLOCK = 4096
"""Tokens of the vocabulary that a program reads at a time."""


class TritonTrees:
    """`TreeKernels`. Keeps the compiled kernels, by the number of nodes."""

    def __init__(self) -> None:
        launcher = Launcher()
        self._build = BoundKernel(
            launcher,
            kernels.build_trees,
            {"BLOCK": BLOCK},
            tensors=(
                *("roots", "scores", "tokens", "parents", "seq_lens"),
                *("links", "mask", "mask_indptr"),
            ),
            numbers=("NODES", "FORM", "BLOCK_D", "BLOCK_N"),
            counts=("batch_size", "num_candidates", "total"),
            options={"num_warps": 4},
        )
        # Of one warp, whose reductions need no barriers
        self._follow = BoundKernel(
            launcher,
            kernels.follow_trees,
            {},
            tensors=("tokens", "visible", "target_predict", "accepted"),
            numbers=("NODES", "IS_CHAIN", "BLOCK_D"),
            counts=("num_nodes",),
            options={"num_warps": 1},
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
        seq_lens: torch.Tensor,
        *,
        topk: int,
        form: TreeMask = "qlen_only",
        total: int | None = None,
    ) -> BuiltTrees:
        """As core's `build_trees`."""
        check_build(scores, draft_token_num, form, total)
        batch_size, num_candidates = scores.shape
        if draft_token_num > MOST_NODES or not batch_size:
            return build_trees(
                roots, scores, tokens, parents, draft_token_num, seq_lens,
                topk=topk, form=form, total=total,
            )  # fmt: skip
        num, device = draft_token_num, scores.device
        links = torch.empty((6, batch_size, num), dtype=torch.int64, device=device)
        masks = _masks(form, batch_size, num, total, device)
        mask, bounds = [*masks.values(), None][:2]
        assert mask is not None
        given = (each.contiguous() for each in (roots, scores, tokens, parents, seq_lens))
        block_n = min(next_power_of_2(max(num_candidates, 8)), 64)
        self._build(
            (batch_size, num if form == "full" else 1, 1),
            (*given, links, mask.view(torch.uint8), bounds),
            (num, FORMS[form], _block(num), block_n),
            (batch_size, num_candidates, total or 0),
            bounds is None,
        )
        made = links.unbind()
        return BuiltTrees(
            draft_tokens=made[0],
            parents=made[1],
            positions=made[2],
            retrieve_index=made[3],
            retrieve_next_token=made[4],
            retrieve_next_sibling=made[5],
            spec=SpecInput(draft_token_num=num, topk=topk, **masks),
        )

    def verify(self, tree: DraftTree, target_predict: torch.Tensor) -> AcceptedDrafts:
        """As core's `verify_tree_greedy`."""
        batch_size, num = tree.draft_tokens.shape
        if num > MOST_NODES or not batch_size:
            return verify_tree_greedy(tree, target_predict)
        accepted = tree.draft_tokens.new_empty((batch_size, 2 * num + 1))
        is_chain = tree.visible is None
        self._follow(
            (batch_size, 1, 1),
            (tree.draft_tokens.contiguous(), _bytes(tree), target_predict.contiguous(), accepted),
            (num, is_chain, _block(num)),
            (tree.num_nodes,),
        )
        return _paths(accepted, num)

    def sample(
        self,
        tree: DraftTree,
        probs: torch.Tensor,
        coins: torch.Tensor,
        thresholds: AcceptThresholds | None = None,
    ) -> AcceptedDrafts:
        """As core's `sample_tree_target_only`."""
        check_sampling(tree, probs, coins)
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


def _masks(
    form: TreeMask, batch_size: int, num: int, total: int | None, device: torch.device
) -> dict[str, torch.Tensor]:
    """Room for a mask in a form, by the fields of `SpecInput`."""
    if form == "qlen_only":
        shape = (batch_size, num, num)
        return {"visible": torch.empty(shape, dtype=torch.bool, device=device)}
    if form == "qlen_only_bitpacking":
        shape = (batch_size, num, -(-num // 8))
        return {"visible_bits": torch.empty(shape, dtype=torch.uint8, device=device)}
    return {
        "custom_mask": torch.empty(total or 0, dtype=torch.bool, device=device),
        "mask_indptr": torch.empty(batch_size + 1, dtype=torch.int32, device=device),
    }


def _paths(accepted: torch.Tensor, num: int) -> AcceptedDrafts:
    """Views of what a launch wrote."""
    return AcceptedDrafts(
        accept_index=accepted[:, :num],
        predict=accepted[:, num : 2 * num],
        accept_token_num=accepted[:, 2 * num],
    )


def make_trees(context: BackendContext) -> TritonTrees:
    """The kernels, each tried once on the context's device."""
    made, device = TritonTrees(), context.device
    ids = torch.zeros((1, 2), dtype=torch.int64, device=device)
    seq_lens = torch.ones(1, dtype=torch.int32, device=device)
    built = made.build(ids[:, 0], ids.float(), ids, ids - 1, 3, seq_lens, topk=2)
    tree = DraftTree(
        draft_tokens=built.draft_tokens,
        links=None,
        visible=built.spec.visible,
        topk=2,
        num_nodes=3,
    )
    made.verify(tree, built.draft_tokens)
    coins = torch.zeros((1, 3), dtype=torch.float64, device=device)
    made.sample(tree, torch.ones((3, 1), device=device), coins)
    return made
