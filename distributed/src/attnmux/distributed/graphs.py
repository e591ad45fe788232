"""Device graphs of steps with collectives: all ranks capture them together, or none has any."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

import torch

from attnmux.core import (
    AttnmuxError,
    CapturingRanks,
    ForwardBatch,
    GraphConfig,
    GraphRunner,
    GraphUnsupported,
)
from attnmux.distributed.errors import RankFailed, RanksDiffer
from attnmux.distributed.ranks import RankGroup

NO_INPUTS: Mapping[str, torch.Tensor] = MappingProxyType({})


def capture_on_all_ranks(
    group: RankGroup,
    make: Callable[[CapturingRanks], GraphRunner],
    batch: ForwardBatch | None = None,
    inputs: Mapping[str, torch.Tensor] = NO_INPUTS,
) -> GraphRunner:
    """Make a runner on every rank of the group and capture its graphs together.

    make: makes this rank's runner with `ranks=` the given ranks. batch, inputs: as
    `GraphRunner.capture`. Returns the runner, whose graphs have the same sizes on every rank.

    Raises GraphUnsupported on every rank, with the number and the reason of each rank that could
    not make or capture its own: then all of them run eagerly. Raises RanksDiffer for configs that
    differ, and RankFailed on the others if a rank fails during a warm-up, as in an eager step.
    """
    ranks = RanksOfGraphs(group)
    with ranks.telling():
        runner = make(ranks)
    runner.capture(batch, inputs)
    return runner


class RanksOfGraphs(CapturingRanks):
    """The ranks of a group, which tell each other of failures whenever they meet.

    All meetings are alike, so that a rank that fails between two of them tells the others at their
    next one. They meet on the host: a device does not wait while it captures.
    """

    def __init__(self, group: RankGroup) -> None:
        self._group = group

    @property
    def rank(self) -> int:
        return self._group.rank

    @contextmanager
    def session(self, config: GraphConfig) -> Iterator[None]:
        with self.telling():
            configs = self._meet(repr(config))
            if len(set(configs)) > 1:
                hint = "capture the same sizes of the same steps on each"
                raise RanksDiffer("graphs", by_rank=configs, hint=hint)
            yield
            self.meet()

    def meet(self) -> None:
        self._meet("")

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Tell the other ranks of an error in this context, and raise theirs on all of them."""
        try:
            yield
        except (RankFailed, RanksDiffer, _NoGraphs):
            raise  # the others know
        except Exception as error:
            self._tell(error)

    def _tell(self, error: Exception) -> None:
        try:
            self._meet("", failure=AttnmuxError.in_brief(error))
        except _NoGraphs as told:
            raise told from error
        except RankFailed:  # the others wait for this one in the step's own collectives
            raise error from None

    def _meet(self, said: str, *, failure: str = "") -> list[str]:
        """The word of each rank. Raises GraphUnsupported if any has failed."""
        words = self._group.exchange(f"failed {failure}" if failure else f"reached {said}")
        parts = [word.partition(" ") for word in words]
        failures = {rank: what for rank, (kind, _, what) in enumerate(parts) if kind == "failed"}
        if failures:
            raise _NoGraphs(failures)
        return [what for _, _, what in parts]


class _NoGraphs(GraphUnsupported):
    """Some ranks of a group have failed, and every rank knows."""

    def __init__(self, failures: Mapping[int, str]) -> None:
        listed = "; ".join(f"rank {rank}: {reason}" for rank, reason in failures.items())
        super().__init__(
            f"no graphs on any rank, since not all could capture them ({listed}): run eagerly on "
            "every rank"
        )
