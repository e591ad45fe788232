"""Which drafts a step accepts."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from attnmux.parts import AcceptedDrafts, AcceptThresholds, DraftTree
from attnmux.transformers.draft.verify_step import VerifyStep
from attnmux.transformers.requests.sampling import NOT_A_NUMBER, Draws, distributions
from attnmux.transformers.run.stats import DraftStats, Laps

Choose = Callable[[DraftTree, torch.Tensor, torch.Tensor, AcceptThresholds], AcceptedDrafts]
"""`sample_tree_target_only`, or a kernel that does the same."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """The target model's answer to the drafts of B requests."""

    paths: Sequence[Sequence[int]]
    """The accepted nodes of each request, from the root on."""
    tokens: list[list[int]]
    """The target's token after each of them."""
    predicted: Sequence[list[int]]
    """All that was looked at: its tokens after each node, or those above."""
    has_unsound: bool
    """Whether one of them is `NOT_A_NUMBER`."""


END = -2
"""After the drafts of a chain: no token of a target, not even `NOT_A_NUMBER`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostTrees:
    """Trees as lists, made while the device runs the step: only the comparison of tokens is left
    after it."""

    tokens: list[list[int]]
    """Without padding. A chain's drafts without the root, and `END` after them."""
    parents: list[list[int]] | None
    """None for chains."""

    @classmethod
    def of(cls, tree: DraftTree) -> HostTrees:
        """tree: its tokens and links on the host."""
        if tree.visible is not None:
            tokens = tree.draft_tokens[:, : tree.num_nodes].tolist()
            return cls(tokens=tokens, parents=tree.parents.tolist())
        drafts: list[list[int]] = tree.draft_tokens[:, 1 : tree.num_nodes].tolist()
        return cls(tokens=[[*draft, END] for draft in drafts], parents=None)

    def accepted(self, predict: Sequence[list[int]]) -> tuple[list[Sequence[int]], list[list[int]]]:
        """The result of `verify_tree_greedy`, in a fraction of its time: the nodes of each
        request's path, and the target's token after each of them.

        predict: the target's token after each of the d nodes.
        """
        if self.parents is None:
            counts = []
            for drafts, after in zip(self.tokens, predict, strict=True):
                count = 0
                while drafts[count] == after[count]:
                    count += 1
                counts.append(count + 1)
            paths: list[Sequence[int]] = [range(count) for count in counts]
            return paths, [after[:count] for after, count in zip(predict, counts, strict=True)]
        paths = list(map(_path, self.tokens, self.parents, predict))
        both = zip(paths, predict, strict=True)
        return paths, [[after[node] for node in path] for path, after in both]


def _path(tokens: list[int], parents: list[int], after: list[int]) -> list[int]:
    path, last, wanted = [0], 0, after[0]
    # A parent precedes its children, so that one pass finds the whole path
    for node in range(1, len(tokens)):
        if parents[node] == last and tokens[node] == wanted:
            path.append(node)
            last, wanted = node, after[node]
    return path


def followed_paths(trees: HostTrees, sampled: torch.Tensor, laps: Laps) -> Answer:
    """Follow the tokens that were sampled after each of the d nodes. Waits for the device.

    sampled: [B * d] int64.
    """
    sampled_ids: list[int] = sampled.tolist()
    num = len(sampled_ids) // len(trees.tokens)
    predicted = [sampled_ids[place : place + num] for place in range(0, len(sampled_ids), num)]
    laps.lap("wait")
    paths, tokens = trees.accepted(predicted)
    unsound = NOT_A_NUMBER in sampled_ids
    return Answer(paths=paths, tokens=tokens, predicted=predicted, has_unsound=unsound)


def sampled_paths(
    tree: DraftTree,
    logits: torch.Tensor,
    draws: Sequence[Draws],
    thresholds: AcceptThresholds,
    choose: Choose,
    laps: Laps,
) -> Answer:
    """Draw the nodes of each request's path, and the token after them. Waits for the device.

    tree: as proposers return it. logits: [B * d, vocabulary], after each node. draws: of each node;
    a node's number decides about its children, and draws the token after it if none is accepted.
    choose: `sample_tree_target_only`, or a kernel.
    """

    def moved(values: torch.Tensor | None) -> torch.Tensor | None:
        return None if values is None else values.to(logits.device, non_blocking=True)

    coins = torch.tensor([draw.draw() for draw in draws], dtype=torch.float64)
    choice = choose(
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
    nodes, tokens = torch.stack([choice.accept_index, choice.predict]).cpu().tolist()
    laps.lap("wait")
    counts = [sum(node >= 0 for node in path) for path in nodes]
    paths = [path[:count] for path, count in zip(nodes, counts, strict=True)]
    answers = [row[:count] for row, count in zip(tokens, counts, strict=True)]
    unsound = any(NOT_A_NUMBER in answer for answer in answers)
    return Answer(paths=paths, tokens=answers, predicted=answers, has_unsound=unsound)


class Verification:
    """Drafts of B requests that the device verifies."""

    def __init__(
        self, step: VerifyStep, answer: Callable[[Laps], Answer], stats: DraftStats
    ) -> None:
        """answer: waits for the device, and says what it accepts."""
        self._step, self._answer, self._stats = step, answer, stats
        self._paths: Sequence[Sequence[int]] = []
        self.accepted: list[int] = []
        """Drafts of each request, once `wait` has returned."""
        self._unsound: list[bool] = []

    @property
    def depth(self) -> int:
        """Drafts of the longest path."""
        tree = self._step.tree
        return tree.num_nodes - 1 if tree.visible is None else int(tree.depths.max())

    def wait(self, laps: Laps) -> list[list[int]]:
        """The new tokens of each request: accepted drafts and one more. Waits for the device."""
        answer = self._answer(laps)
        tokens, self._paths = answer.tokens, answer.paths
        if answer.has_unsound:
            self._unsound = [NOT_A_NUMBER in row for row in answer.predicted]
        self.accepted = [len(each) - 1 for each in tokens]
        self._stats.count(len(tokens), self._step.num_drafts - 1, sum(self.accepted))
        return tokens

    def tell(self) -> None:
        """Requests with drafts have no log probabilities."""

    def commit(self, lens: Sequence[int] | None) -> None:
        """Keep the K and V of the tokens that the requests took, and free all other slots.

        lens: tokens of each request now; None if they took all.
        """
        paths = self._paths
        if lens is not None:
            taken = map(operator.sub, lens, self._step.prefixes)  # and the pending one
            paths = [path[: num - 1] for path, num in zip(paths, taken, strict=True)]
        self._step.commit(paths, self._unsound)
