"""How a process measures: alone, or together with the other ranks of a group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

T = TypeVar("T")


class Together(Protocol):
    """Calls a function on all ranks at the same time; `alone`, and another in attnmux-bench."""

    def __call__(
        self, measure: Callable[[], tuple[T, Sequence[float]]], /
    ) -> tuple[T, tuple[float, ...]]:
        """measure: returns something of this rank, and figures, as many on each rank.

        Returns the former, and for each figure the largest of all ranks. Raises on every rank if
        `measure` raises on one.
        """


def alone(measure: Callable[[], tuple[T, Sequence[float]]], /) -> tuple[T, tuple[float, ...]]:
    """`Together` of a single process."""
    made, figures = measure()
    return made, tuple(figures)
