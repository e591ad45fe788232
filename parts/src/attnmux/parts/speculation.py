"""Draft trees: building them, verifying them against the target model, and moving accepted tokens.

B requests have d draft tokens each. Node 0 of a tree is its root, the token that the last step
sampled. A parent precedes its children. Nothing here synchronises, except for checks on a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.nn.functional import pad

from attnmux.core import InvalidInput, SpecInput
from attnmux.core.plugin import check_tensor


def tree_visibility(parents: torch.Tensor) -> torch.Tensor:
    """The draft tokens that each draft token sees: itself and its ancestors.

    parents: [B, d] int; the parent of each draft token, at most d - 1; the root's is -1.
    Returns [B, d, d] bool; row i has the tokens that i sees.
    Raises InvalidInput, on a CPU, for a parent that does not precede its child.
    """
    if parents.dim() != 2:
        raise InvalidInput("parents", got=f"shape {tuple(parents.shape)}", expected="[B, d]")
    batch_size, num_tokens = parents.shape
    order = torch.arange(num_tokens, device=parents.device)
    if parents.is_cpu and bool((parents >= order).any()):
        raise InvalidInput(
            "parents", got="a parent at or after its child", expected="parents in draft order"
        )
    reach = torch.eye(num_tokens, dtype=torch.float32, device=parents.device)
    reach = reach.repeat(batch_size, 1, 1)
    has_parent = (parents >= 0).unsqueeze(-1)
    reach.scatter_add_(2, parents.clamp(min=0).long().unsqueeze(-1), has_parent.float())
    reach.clamp_(max=1)
    for _ in range(max(num_tokens - 1, 0).bit_length()):
        reach = (reach @ reach).clamp_(max=1)
    return reach > 0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DraftTree:
    """The draft tokens of a step.

    Trees that are smaller than those of a graph end with padding: nodes that are never accepted.
    """

    draft_tokens: torch.Tensor
    """[B, d] int64"""
    links: torch.Tensor | None
    """[B, d] int64: the parent of each node; -1 for the root and for padding. None for chains."""
    visible: torch.Tensor | None
    """[B, d, d] bool: the nodes that each node sees. Padding sees itself alone. None for chains,
    which are causal and need no mask."""
    topk: int
    """1 if every tree is a chain. Otherwise above 1."""
    num_nodes: int
    """Nodes of each tree without padding."""
    levels: torch.Tensor | None = None
    """[B, d] int64: `depths`, if the tree has them already."""

    @property
    def draft_token_num(self) -> int:
        """d, the root included."""
        return self.draft_tokens.shape[1]

    @property
    def parents(self) -> torch.Tensor:
        """[B, d] int64: the parent of each node; -1 for the root and for padding."""
        if self.links is not None:
            return self.links
        parents = torch.arange(-1, self.draft_token_num - 1, device=self.draft_tokens.device)
        parents[self.num_nodes :] = -1
        return parents.expand_as(self.draft_tokens)

    @classmethod
    def chains(cls, draft_tokens: torch.Tensor) -> DraftTree:
        """Trees in which each node is the only child of the node before it."""
        num = draft_tokens.shape[1]
        return cls(draft_tokens=draft_tokens, links=None, visible=None, topk=1, num_nodes=num)

    @classmethod
    def of(cls, draft_tokens: torch.Tensor, parents: torch.Tensor, *, topk: int) -> DraftTree:
        """Trees by their parents.

        draft_tokens, parents: [B, d] int64. topk: as in the class.
        Raises InvalidInput for other shapes and, on a CPU, for a parent at or after its child.
        """
        check_tensor("draft_tokens", draft_tokens, ("B", "d"))
        check_tensor("parents", parents, draft_tokens.shape)
        if topk == 1:
            return cls.chains(draft_tokens)
        return cls(
            draft_tokens=draft_tokens,
            links=parents,
            visible=tree_visibility(parents),
            topk=topk,
            num_nodes=draft_tokens.shape[1],
        )

    def padded(self, draft_token_num: int) -> DraftTree:
        """With padding up to so many nodes, at least d."""
        more = draft_token_num - self.draft_token_num
        if not more:
            return self
        links, visible, levels = self.links, self.visible, self.levels
        if visible is not None:
            visible = pad(visible, (0, more, 0, more))
            visible.diagonal(dim1=1, dim2=2).fill_(True)
        if links is not None:
            links = pad(links, (0, more), value=-1)
        if levels is not None:
            levels = pad(levels, (0, more))
        tokens = pad(self.draft_tokens, (0, more))
        return replace(self, draft_tokens=tokens, links=links, visible=visible, levels=levels)

    def siblings(self) -> torch.Tensor:
        """[B, d, d] bool: whether j is an earlier child of i's parent."""
        order = torch.arange(self.draft_token_num, device=self.draft_tokens.device)
        parents = self.parents
        alike = parents.unsqueeze(2) == parents.unsqueeze(1)
        return alike & (order < order.unsqueeze(1))

    @property
    def depths(self) -> torch.Tensor:
        """[B, d] int64: edges from the root to each node; 0 for padding of trees with branches."""
        if self.levels is not None:
            return self.levels
        if self.visible is None:
            order = torch.arange(self.draft_token_num, device=self.draft_tokens.device)
            return order.expand_as(self.draft_tokens)
        return self.visible.sum(-1) - 1

    def spec_input(self, device: torch.device) -> SpecInput:
        """`ForwardBatch.spec_info` of the step that verifies the trees, on a device.

        Trees that are no chains have `SpecInput.visible`: the size does not depend on the prefixes.
        """
        visible = self.visible
        return SpecInput(
            draft_token_num=self.draft_token_num,
            topk=self.topk,
            visible=None if visible is None else visible.to(device, non_blocking=True),
        )

    @staticmethod
    def check_num_nodes(draft_token_num: int, num_candidates: int) -> None:
        """Raises InvalidInput for trees of more nodes than the root and the candidates."""
        if not 1 <= draft_token_num <= num_candidates + 1:
            expected = f"1 to {num_candidates + 1}, for {num_candidates} candidates and the root"
            raise InvalidInput("draft_token_num", got=draft_token_num, expected=expected)

    @staticmethod
    def best_of(
        roots: torch.Tensor,
        scores: torch.Tensor,
        tokens: torch.Tensor,
        parents: torch.Tensor,
        draft_token_num: int,
        *,
        topk: int,
    ) -> DraftTree:
        """The trees of the best candidates, in the order of the candidates.

        roots: [B] int64. scores, tokens, parents: [B, n], n candidates a request; a parent is the
        index of an earlier candidate, or -1 for the root. A candidate's score is at most its
        parent's, as the probability of a path is, so that the best ones form a tree.
        draft_token_num: nodes to take, the root included, at most n + 1. topk: above 1 unless the
        candidates are chains.
        Raises InvalidInput for too many nodes.
        """
        DraftTree.check_num_nodes(draft_token_num, scores.shape[1])
        num_drafts = draft_token_num - 1
        # A stable sort prefers a parent to a child of the same score
        best = scores.argsort(dim=1, descending=True, stable=True)[:, :num_drafts]
        best = best.sort(dim=1).values
        above = parents.gather(1, best)
        places = torch.searchsorted(best, above.contiguous()) + 1
        roots = roots.unsqueeze(1)
        return DraftTree.of(
            torch.cat([roots, tokens.gather(1, best)], dim=1),
            torch.cat([torch.full_like(roots, -1), torch.where(above < 0, 0, places)], dim=1),
            topk=topk,
        )

    def check_sampling(self, probs: torch.Tensor, coins: torch.Tensor) -> None:
        """Raises InvalidInput for tensors that `sample_tree_target_only` does not take."""
        batch_size, num = self.draft_tokens.shape
        shape = (batch_size * num, "vocabulary")
        check_tensor("probs", probs, shape, None, torch.float32)
        check_tensor("coins", coins, (batch_size, num), None, torch.float64)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AcceptedDrafts:
    """The accepted path of each request, [B, d] int64. Places after a path's end hold -1."""

    accept_index: torch.Tensor
    """The nodes of the path, the root first."""
    predict: torch.Tensor
    """The target's token after each of them. The last one is the bonus token; those before it are
    the accepted drafts."""
    accept_token_num: torch.Tensor
    """[B] int64: accepted drafts, the bonus token not counted."""
