"""The ranks that capture graphs together, as a runner knows them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from attnmux.core.graph.config import GraphConfig


class CapturingRanks:
    """Ranks whose graphs hold collectives of each other, as one of them sees them: here a single
    one, which has no other to wait for.

    Either all of them have graphs of the same sizes, or none has.
    """

    @property
    def rank(self) -> int:
        """This rank's number. Rank 0 shows the progress."""
        return 0

    @contextmanager
    def session(self, config: GraphConfig) -> Iterator[None]:
        """The context of all captures and of what they allocate before.

        Raises GraphUnsupported on every rank if one of them raises in it, and RanksDiffer for
        ranks whose configs differ.
        """
        yield

    def meet(self) -> None:
        """Wait for all ranks before a warm-up and before a capture. Raises as `session` does."""


ALONE = CapturingRanks()
