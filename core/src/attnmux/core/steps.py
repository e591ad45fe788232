"""The preparation of a step, in the two halves that a device graph needs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import TypeVar

from attnmux.core.batch import ForwardBatch
from attnmux.core.errors import AttnmuxError, GraphUnsupported

S = TypeVar("S")

NO_OPTIONS: Mapping[str, object] = MappingProxyType({})
"""Of a backend whose card has none, or whose defaults hold."""


class StepBackend(ABC):
    """Something that is prepared once for each step and then runs the step's layers.

    Preparation has two halves, one on each side of a device graph: `..._out_graph` runs before
    capture and before each replay, and `..._in_graph` is captured and replayed. An eager step runs
    both. One instance has one step in flight.
    """

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        """Prepare an eager step. Raises InvalidInput for a malformed batch."""
        self.init_forward_metadata_out_graph(batch)
        self.init_forward_metadata_in_graph(batch)

    @abstractmethod
    def init_forward_metadata_out_graph(
        self, batch: ForwardBatch, in_capture: bool = False
    ) -> None:
        """Prepare on the host: dynamic shapes, a library's `plan()`. It may synchronise."""

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        """Prepare on the device with static shapes. It must not synchronise or keep allocations."""

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate the buffers that graphs of steps up to this size read.

        Each graph runner calls it before it captures. Captured graphs keep reading earlier buffers,
        so that a call which needs more room must add buffers and not move any. Larger steps run
        eagerly. Raises GraphUnsupported unless the backend overrides it.
        """
        raise GraphUnsupported(f"{type(self).__name__} cannot be captured in a device graph")


def prepared(step: S | None) -> S:
    """The step that a backend keeps. Raises AttnmuxError where none is prepared."""
    if step is None:
        raise AttnmuxError("no step is prepared: call init_forward_metadata(batch) first")
    return step
