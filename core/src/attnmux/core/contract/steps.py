"""The preparation of a step, in the two halves that a device graph needs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeVar

from attnmux.core.contract.batch import ForwardBatch
from attnmux.core.facts.errors import AttnmuxError, GraphUnsupported

if TYPE_CHECKING:
    import torch

S = TypeVar("S")

NO_OPTIONS: Mapping[str, object] = MappingProxyType({})
"""The default `options`: none."""


class StepBackend(ABC):
    """Something that is prepared once for each step and then runs the step's layers.

    Preparation has two halves, one on each side of a device graph: `..._out_graph` runs before
    capture and before each replay, and `..._in_graph` is captured and replayed. An eager step runs
    both. One instance has one step in flight.
    """

    NO_OPTIONS = NO_OPTIONS

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
    """The step that a backend keeps. Raises AttnmuxError if none is prepared."""
    if step is None:
        raise AttnmuxError("no step is prepared: call init_forward_metadata(batch) first")
    return step


class FixedTensors:
    """Fields of steps where captured graphs read them.

    Graphs keep reading earlier sets, so that sets are added and never moved. A step takes the first
    one with room, at capture and at every replay.
    """

    def __init__(self) -> None:
        self._sets: list[dict[str, torch.Tensor]] = []

    def add(self, **tensors: torch.Tensor) -> None:
        """Another set, by the names of the fields, unless a known one has as much room."""
        if not any(_fits(tensors, known) for known in self._sets):
            self._sets.append(tensors)

    def add_decoding(self, max_bs: int, device: torch.device) -> None:
        """A set for decode steps of requests that lie in rows 1 to `max_bs` of a table."""
        import torch  # noqa: PLC0415  # the contract of steps loads without

        self.add(
            req_pool_indices=torch.arange(1, max_bs + 1, device=device),
            seq_lens=torch.ones(max_bs, dtype=torch.int32, device=device),
            positions=torch.zeros(max_bs, dtype=torch.int64, device=device),
        )

    def holding(self, step: S) -> S:
        """The step, a dataclass, with copies of its fields in views of a set. Without room it stays
        where it is."""
        for room in self._sets:
            tensors = {name: getattr(step, name) for name in room}
            if _fits(tensors, room):
                held = {
                    name: room[name].view(-1)[: tensor.numel()].view_as(tensor).copy_(tensor)
                    for name, tensor in tensors.items()
                }
                return replace(step, **held)  # type: ignore[type-var]  # a dataclass
        return step


def _fits(given: Mapping[str, torch.Tensor], room: Mapping[str, torch.Tensor]) -> bool:
    return all(tensor.numel() <= room[name].numel() for name, tensor in given.items())
