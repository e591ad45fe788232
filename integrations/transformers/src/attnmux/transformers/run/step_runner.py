"""A model as an engine and a proposer use it, and the kernels for its draft trees."""

from __future__ import annotations

from typing import Protocol

import torch

from attnmux.core import GraphRunner
from attnmux.parts import AcceptedDrafts, AcceptThresholds, DraftTree
from attnmux.transformers.ranks import Ranks
from attnmux.transformers.requests.batching import StepBuilder
from attnmux.transformers.requests.sequence import Step
from attnmux.transformers.run.stats import Laps


class TreeKernels(Protocol):
    """A plugin's shared kernel `draft_trees`. Nothing synchronises, so that graphs can hold it."""

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
        """Like `DraftTree.best_of`, for trees with branches and float32 scores. The tree has its
        `levels`."""

    def sample(
        self,
        tree: DraftTree,
        probs: torch.Tensor,
        coins: torch.Tensor,
        thresholds: AcceptThresholds | None = None,
    ) -> AcceptedDrafts:
        """See `sample_tree_target_only`."""


class StepRunner(Protocol):
    """A model as an engine uses it; `ModelRunner` is one."""

    @property
    def steps(self) -> StepBuilder: ...

    @property
    def vocabulary_size(self) -> int: ...

    @property
    def is_deterministic(self) -> bool:
        """Whether a request's logits must not depend on the other requests."""

    @property
    def ranks(self) -> Ranks:
        """The ranks that run the model, each with an engine of the same requests, or of its own
        part of them."""

    @property
    def verify_graphs(self) -> GraphRunner | None:
        """The graphs of steps that verify drafts; None if these run eagerly. Trees are padded to
        their number of tokens."""

    @property
    def tree_kernels(self) -> TreeKernels | None:
        """The device's kernels for draft trees; None leaves them to plain operations."""

    def check_drafts(self, topk: int) -> None:
        """Raise InvalidInput unless steps verify drafts of up to `topk` branches."""

    def forward(self, step: Step, indices: torch.Tensor, laps: Laps | None = None) -> torch.Tensor:
        """The logits [n, vocabulary] after the step's tokens at `indices` [n] int64.

        laps: its time goes to "metadata" and "launch".
        """

    def idle(self) -> bool:
        """Run a step without requests, for other ranks that have some. Returns False if no rank
        has any."""
