"""The ranks that run one model: a single one here, several in `parallel`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from transformers import PreTrainedModel

from attnmux.core import (
    AttentionBackend,
    BackendContext,
    CapturingRanks,
    Choice,
    Decision,
    GraphRunner,
    KVPool,
    LayerSpec,
    Measurement,
    Offer,
    PagedAllocator,
    Platform,
    Policy,
    Request,
    TunedLaunch,
    build,
    solve_measured,
)
from attnmux.core.graph.together import ALONE
from attnmux.transformers.sequence import Step

T = TypeVar("T")


class Ranks:
    """One rank alone. Subclasses meet the others in each method, which every rank calls."""

    rank: int = 0
    size: int = 1

    @property
    def head_ranks(self) -> int:
        """Ranks that the heads of a layer are split over."""
        return 1

    def check_libraries(self, offers: Sequence[Offer]) -> None:
        """Raise RanksDiffer where plugins or libraries of two ranks differ."""

    def split(self, model: PreTrainedModel) -> None:
        """Keep this rank's part of the weights. Raises InvalidInput for a model that cannot be
        split."""

    def solve(
        self,
        request: Request,
        platform: Platform,
        offers: Sequence[Offer],
        policy: Policy,
        measurements: Sequence[Measurement],
    ) -> Decision:
        """Choose the backends of a request, whose heads are those of one rank."""
        return solve_measured(request, platform, offers, policy, measurements=measurements)

    def decided(
        self, decide: Callable[[], Decision], platform: Platform, offers: Sequence[Offer]
    ) -> Decision:
        """The decision of rank 0. `decide` calls `solve`, and its errors are every rank's."""
        return decide()

    def launches(self, own: tuple[TunedLaunch, ...]) -> tuple[TunedLaunch, ...]:
        """The tuned launches that every rank runs: those of rank 0."""
        return own

    def together(self, make: Callable[[], T]) -> T:
        """What `make` returns, if it succeeds on every rank."""
        return make()

    def smallest(self, number: int) -> int:
        """The smallest number of all ranks."""
        return number

    def stored(self, layers: Sequence[LayerSpec]) -> tuple[LayerSpec, ...]:
        """The layers as this rank's KV pool stores them."""
        return tuple(layers)

    def tokens_each(self, tokens: int) -> int:
        """Tokens of this rank's pool, in whole pages, for so many tokens of requests."""
        return tokens

    def shared_pool(self, own: KVPool, allocator: PagedAllocator) -> tuple[KVPool, PagedAllocator]:
        """The pool and the allocator of all ranks' slots, of which `own` has this rank's."""
        return own, allocator

    def build(self, decision: Decision, context: BackendContext) -> AttentionBackend:
        return build(decision, context)

    def served(self, decision: Decision) -> Mapping[str, Choice]:
        """The backends of a decision by phase."""
        return decision.phases

    def summary(self, decision: Decision) -> str:
        """The decision for a reader."""
        return decision.summary()

    def capture(self, make: Callable[[CapturingRanks], GraphRunner]) -> GraphRunner:
        """A runner with captured graphs. Raises GraphUnsupported."""
        runner = make(ALONE)
        runner.capture()
        return runner

    def run(
        self,
        step: Step,
        indices: torch.Tensor,
        run: Callable[[Step, torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """The logits after the step's tokens at `indices`, [n, vocabulary].

        run: runs the model on a step's tokens, and returns the logits after some of them.
        """
        return run(step, indices)

    def check_step(self, kind: str, requests: Callable[[], Sequence[Sequence[int]]]) -> None:
        """Raise RanksDiffer unless every rank runs the same step of the same requests."""

    def wait(self, event: torch.Event) -> None:
        """Wait for the device."""
        event.synchronize()


ONE_RANK = Ranks()
