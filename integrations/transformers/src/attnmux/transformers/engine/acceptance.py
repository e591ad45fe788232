"""Which drafts a step accepts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from attnmux.core import AcceptedDrafts, AcceptThresholds, DraftTree
from attnmux.transformers.sampling import Draws, distributions

Choose = Callable[[DraftTree, torch.Tensor, torch.Tensor, AcceptThresholds], AcceptedDrafts]
"""`sample_tree_target_only`, or a kernel that does the same."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostTrees:
    """Trees as lists, made while the device runs the step: what is left to do after it is to
    compare tokens."""

    tokens: list[list[int]]
    """Without padding."""
    parents: list[list[int]] | None
    """None for chains."""

    @classmethod
    def of(cls, tree: DraftTree) -> HostTrees:
        """tree: its tokens and links on the host."""
        tokens = tree.draft_tokens[:, : tree.num_nodes].tolist()
        return cls(tokens=tokens, parents=None if tree.visible is None else tree.parents.tolist())

    def accepted(self, predict: Sequence[list[int]]) -> tuple[list[Sequence[int]], list[list[int]]]:
        """What `verify_tree_greedy` accepts, in a fraction of its time: the nodes of each request's
        path, and the target's token after each of them.

        predict: the target's token after each of the d nodes.
        """
        if self.parents is None:
            counts = list(map(_count, self.tokens, predict))
            paths: list[Sequence[int]] = [range(count) for count in counts]
            return paths, [after[:count] for after, count in zip(predict, counts, strict=True)]
        paths = list(map(_path, self.tokens, self.parents, predict))
        both = zip(paths, predict, strict=True)
        return paths, [[after[node] for node in path] for path, after in both]


def _count(tokens: list[int], after: list[int]) -> int:
    """Nodes of a chain that are accepted, the root included."""
    count = 1
    while count < len(tokens) and tokens[count] == after[count - 1]:
        count += 1
    return count


def _path(tokens: list[int], parents: list[int], after: list[int]) -> list[int]:
    path, last, wanted = [0], 0, after[0]
    # A parent precedes its children, so that one pass finds the whole path
    for node in range(1, len(tokens)):
        if parents[node] == last and tokens[node] == wanted:
            path.append(node)
            last, wanted = node, after[node]
    return path


def sampled_paths(
    tree: DraftTree,
    logits: torch.Tensor,
    draws: Sequence[Draws],
    thresholds: AcceptThresholds,
    choose: Choose,
) -> tuple[list[list[int]], list[list[int]]]:
    """The nodes of each request's path from the root on, and the tokens that it says: those of the
    path's other nodes, and the one drawn after them.

    tree: as proposers return it. logits: [B * d, vocabulary], after each node. draws: of each node;
    a node's number decides about its children, and draws the token after it where none is accepted.
    choose: `sample_tree_target_only`, or a kernel. Waits for the device.
    """

    def moved(values: torch.Tensor | None) -> torch.Tensor | None:
        return None if values is None else values.to(logits.device, non_blocking=True)

    coins = torch.tensor([each.draw() for each in draws], dtype=torch.float64)
    found = choose(
        replace(
            tree,
            draft_tokens=tree.draft_tokens.to(logits.device, non_blocking=True),
            links=moved(tree.links),
            visible=moved(tree.visible),
        ),
        distributions(logits, draws),
        coins.view_as(tree.draft_tokens).to(logits.device, non_blocking=True),
        thresholds,
    )
    nodes, tokens = torch.stack([found.accept_index, found.predict]).cpu().tolist()
    counts = [sum(node >= 0 for node in path) for path in nodes]
    paths = [path[:count] for path, count in zip(nodes, counts, strict=True)]
    return paths, [said[:count] for said, count in zip(tokens, counts, strict=True)]
