"""Draft trees: building them, verifying them against the target model, and moving accepted tokens.

B requests have d draft tokens each. Node 0 of a tree is its root, the token that the last step
sampled. A parent precedes its children. Nothing here synchronises, except for checks on a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.nn.functional import pad

from attnmux.core import InvalidInput, SpecInput
from attnmux.core.plugin import described, tree_visibility


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
        if draft_tokens.dim() != 2 or draft_tokens.shape != parents.shape:
            got = f"{described(draft_tokens)} with parents {tuple(parents.shape)}"
            raise InvalidInput("draft_tokens", got=got, expected="[B, d] for both")
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
        if probs.dim() != 2 or probs.shape[0] != batch_size * num or probs.dtype != torch.float32:
            expected = f"float32 [{batch_size * num}, vocabulary]"
            raise InvalidInput("probs", got=described(probs), expected=expected)
        if coins.shape != (batch_size, num) or coins.dtype != torch.float64:
            raise InvalidInput(
                "coins", got=described(coins), expected=f"float64 [{batch_size}, {num}]"
            )


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
