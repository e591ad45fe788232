"""A step of drafts that the device verifies, from its launch to its commit."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

from attnmux.transformers.draft.verify_step import VerifyStep
from attnmux.transformers.engine.acceptance import Answer
from attnmux.transformers.requests.sampling import NOT_A_NUMBER
from attnmux.transformers.run.stats import DraftStats, Laps


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
