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
    ForwardBatch,
    GraphRunner,
    KVPool,
    LayerSpec,
    Measurement,
    Offer,
    Platform,
    Policy,
    Request,
    TunedLaunch,
    build,
    solve_measured,
)
from attnmux.transformers.requests.prompt_images import PromptImages
from attnmux.transformers.requests.sequence import Step
from attnmux.transformers.requests.slots import PagedAllocator

T = TypeVar("T")


class Deals:
    """How the requests are dealt out: every rank runs all of them, or has one part of its own."""

    num_parts: int = 1
    """Parts of the requests."""
    part: int = 0
    """This rank's."""

    def deal(self, items: Sequence[T]) -> list[Sequence[T]]:
        """Deal out the requests, one to each part in turn, so that the first is the largest."""
        return [items[part :: self.num_parts] for part in range(self.num_parts)]

    def gather(self, said: T) -> list[T]:
        """The values of the ranks of each part. They are pickled."""
        return [said]

    def check_prompts(self, prompts: Callable[[], Sequence[Sequence[int]]]) -> None:
        """Raise RanksDiffer unless every rank got the same prompts, if only now they can tell."""

    def read_images(self, read: Callable[[], PromptImages]) -> PromptImages:
        """The images that `read` returns, which every rank reads from the same inputs."""
        return read()


class Builds:
    """How ranks decide and build: backends, weights and pools of each rank."""

    run_images: bool = True
    """Whether prompts may hold images."""
    run_indexers: bool = True
    """Whether indexers may pick keys: each rank keeps those of all tokens of its requests, and
    picks from the same states."""

    @property
    def head_ranks(self) -> int:
        """Ranks that the heads of a layer are split over."""
        return 1

    def check_libraries(self, offers: Sequence[Offer]) -> None:
        """Raise RanksDiffer if plugins or libraries of two ranks differ."""

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
        """The result of `make`, if it succeeds on every rank."""
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
        """The pool and the allocator of all ranks' slots; `own` has this rank's."""
        return own, allocator

    def build(self, decision: Decision, context: BackendContext) -> AttentionBackend:
        return build(decision, context)

    def served(self, decision: Decision) -> Mapping[str, Choice]:
        """The backends of a decision by phase."""
        return decision.phases

    def summary(self, decision: Decision) -> str:
        """The decision for a reader."""
        return decision.summary()


class Synchronises:
    """How a rank meets the others in a step."""

    def check_step(self, kind: str, requests: Callable[[], Sequence[Sequence[int]]]) -> None:
        """Raise RanksDiffer unless every rank runs the same step of the same requests."""

    def begin(self, step: Step, indices: torch.Tensor) -> tuple[Step, torch.Tensor]:
        """This rank's part of a step, and the tokens whose logits it needs."""
        return step, indices

    def end(self, logits: torch.Tensor, num_rows: int) -> torch.Tensor:
        """The logits that every rank continues with, [num_rows, vocabulary], from this rank's."""
        return logits

    def graph_size(self, batch: ForwardBatch, graphs: GraphRunner | None) -> int | None:
        """Agree on a step before it runs. Returns the captured size that every rank replays; None
        if they run eagerly."""
        return None if graphs is None else graphs.size_for(batch)

    def idle(self, graphs: GraphRunner | None, run_padding: Callable[[], object]) -> bool:
        """Take part in a step of ranks that have requests, without any. Returns False if no rank
        has any. run_padding: runs one token of padding eagerly."""
        return False

    def capture(self, make: Callable[[CapturingRanks], GraphRunner]) -> GraphRunner:
        """A runner with captured graphs. Raises GraphUnsupported."""
        runner = make(CapturingRanks())
        runner.capture()
        return runner

    def wait(self, event: torch.Event) -> None:
        """Wait for the device."""
        event.synchronize()


class Ranks:
    """The ranks that run one model. This process is one of them; by default there is no other.

    Those of several meet in each method of the three, which every rank calls.
    """

    def __init__(
        self,
        *,
        rank: int = 0,
        size: int = 1,
        requests: Deals | None = None,
        building: Builds | None = None,
        steps: Synchronises | None = None,
    ) -> None:
        self.rank, self.size = rank, size
        self.requests = requests or Deals()
        self.building = building or Builds()
        self.steps = steps or Synchronises()


ONE_RANK = Ranks()
