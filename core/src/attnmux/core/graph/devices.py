"""The interface of device graphs, its implementation for CUDA and HIP, how plugins provide those of
other devices, and the ranks that capture together."""

from __future__ import annotations

import gc
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch

from attnmux.core.facts.errors import AttnmuxError, GraphUnsupported
from attnmux.core.find.graphs import GROUP
from attnmux.core.find.plugins import admitted_points
from attnmux.core.graph.config import GraphConfig


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GraphStep:
    """A step to capture, in two parts."""

    prepare: Callable[[], None]
    """`init_forward_metadata_in_graph`: static shapes, no synchronisation, no allocation."""
    forward: Callable[[], Any]
    """The model's call. Its allocations belong to the graph."""
    host_tensors: tuple[torch.Tensor, ...] = ()
    """Tensors on the host that change between replays; a graph cannot read them."""

    def run(self) -> Any:  # noqa: ANN401  # a tensor or a container of tensors
        """Run both parts. Returns the result of the model's call."""
        self.prepare()
        return self.forward()


@dataclass(kw_only=True, slots=True, eq=False)
class CapturedGraph:
    """A step, or a piece of one, that can be launched again."""

    replay: Callable[[], None]
    """Runs the captured operations on the present contents of their buffers."""
    outputs: Any = None
    """The step's result, which each replay overwrites; None for a piece."""
    nbytes: int = 0
    """Memory that the graph takes on the device."""
    repeats: bool = True
    """Whether replays may follow each other without `init_forward_metadata_out_graph` between."""


class DeviceGraphs(ABC):
    """The graphs of one device. They share a memory pool, so that one may run at a time."""

    NUM_WARM_UPS = 2
    """Runs before a capture. The first compiles kernels and sets libraries up; the second sees the
    allocations that these made once."""

    @abstractmethod
    @contextmanager
    def session(self) -> Iterator[None]:
        """The context of warm-ups and captures."""

    @abstractmethod
    def warm_up(self, step: GraphStep) -> None:
        """Run the step once, as it will be captured."""

    @abstractmethod
    def capture(self, step: GraphStep) -> CapturedGraph:
        """Capture the step. Raises GraphUnsupported for a step that cannot be replayed."""

    def piece(self) -> AbstractContextManager[CapturedGraph]:
        """A block, inside a session, whose operations are captured. It may end in another function
        than the one that began it. What it captured can be launched once it has ended.

        Raises GraphUnsupported for a device whose graphs hold whole steps alone, and at the end
        for operations that cannot be replayed.
        """
        raise self._no_pieces()

    def unowned(self, tensor: torch.Tensor) -> torch.Tensor:
        """A captured tensor, whose memory later captures may use as soon as the step drops it. It
        has its values only between the pieces of a replay where it had them in the capture.

        Raises GraphUnsupported for a device on which pieces would keep the memory of all layers.
        """
        raise self._no_pieces()

    def _no_pieces(self) -> GraphUnsupported:
        kind = type(self).__name__
        return GraphUnsupported(f"{kind} captures whole steps, and no pieces of one")

    @staticmethod
    def of(device: torch.device, device_type: str | None = None) -> DeviceGraphs:
        """The graphs of a device: of CUDA here, of another type those that a plugin provides.

        device_type: the type whose graphs to make, if tensors of an emulated device are on another
        one.
        Raises GraphUnsupported for a device without graphs, or whose graphs cannot be made.
        """
        kind = device_type or device.type
        if kind == "cuda":
            return CudaGraphs(device)
        offered = admitted_points(GROUP, kind)
        if len(offered) != 1:
            owners = " and ".join(offered)
            raise GraphUnsupported(
                f"{owners} both provide graphs of {kind!r} devices: deny one of them (deny_plugins)"
                if offered
                else f"no graphs for {kind!r} devices, only for cuda and devices of plugins that "
                "provide them: run eagerly, or pass RecordingGraphs() to test a step without such "
                "a device"
            )
        ((owner, point),) = offered.items()
        try:
            make: Any = point.load()
            graphs: DeviceGraphs = make(device)
        except Exception as error:  # a plugin may raise anything
            reason = f"{owner}'s graphs of {kind!r} devices: {AttnmuxError.in_brief(error)}"
            raise GraphUnsupported(reason) from error
        return graphs


class StreamGraphs(DeviceGraphs):
    """Graphs that a device's part of torch captures on a stream."""

    def __init__(self, device: torch.device, api: Any, graph: Callable[[], Any]) -> None:  # noqa: ANN401  # a module
        """api: what `torch.cuda` is to CUDA. graph: makes an empty graph."""
        self._device, self._api, self._graph = device, api, graph
        self._stream = api.Stream(device)
        self._pool = api.graph_pool_handle()

    @contextmanager
    def session(self) -> Iterator[None]:
        current = self._api.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            with self._api.stream(self._stream), _no_garbage_collection():
                yield
        finally:
            # After a failure, kernels that still run share memory with eager steps
            current.wait_stream(self._stream)

    def warm_up(self, step: GraphStep) -> None:
        self._api.synchronize(self._device)
        step.run()
        self._api.synchronize(self._device)

    def capture(self, step: GraphStep) -> CapturedGraph:
        with self.piece() as whole:
            whole.outputs = step.run()
        return whole

    @contextmanager
    def piece(self) -> Iterator[CapturedGraph]:
        api, graph = self._api, self._graph()
        # Otherwise torch's cache of the warm-ups would hide the memory that the graph takes
        api.empty_cache()
        free, _ = api.mem_get_info(self._device)
        piece = CapturedGraph(replay=graph.replay)
        try:
            with api.graph(
                graph,
                pool=self._pool,
                stream=self._stream,
                # Other threads go on using the device
                capture_error_mode="thread_local",
            ):
                yield piece
        except RuntimeError as error:
            self.recover()
            raise GraphUnsupported(_why(error)) from error
        left, _ = api.mem_get_info(self._device)
        piece.nbytes = max(free - left, 0)

    def recover(self) -> None:
        """Called after a capture that failed."""


class CudaGraphs(StreamGraphs):
    """Graphs of CUDA, and of HIP, which torch calls CUDA too."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device, torch.cuda, torch.cuda.CUDAGraph)

    def unowned(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor over the address alone. The pool keeps its memory as long as its graphs live."""
        storage = tensor.untyped_storage()
        borrowed = torch._C._construct_storage_from_data_pointer(
            storage.data_ptr(), tensor.device, storage.nbytes()
        )
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return empty.set_(borrowed, tensor.storage_offset(), tensor.shape, tensor.stride())

    def recover(self) -> None:
        """Let torch's generator draw eagerly again.

        After a failed capture it still believes to be captured, and every later draw raises. An
        empty capture that succeeds resets it.
        """
        with suppress(RuntimeError), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the graph is empty
            with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=self._stream):
                pass


def _why(error: RuntimeError) -> str:
    # The end of a failed capture raises too, with less information than its cause
    first = error.__context__ if isinstance(error.__context__, RuntimeError) else error
    if isinstance(first, torch.OutOfMemoryError):
        return (
            f"no memory is left for graphs: {first}; capture smaller batch sizes, or give the KV "
            "pool less"
        )
    return (
        f"the step cannot be captured: {first}; a captured step must not synchronise, read from "
        "the device, or copy from pageable host memory"
    )


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A graph that is collected during a capture frees memory, which invalidates the capture."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


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
