"""Graphs of CUDA around what torch does, on machines without it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from attnmux.core import DeviceGraphs, GraphUnsupported, InvalidInput
from attnmux.core.graph.devices import CudaGraphs
from attnmux.core.plugin import GraphStep


class Stream:
    def __init__(self, name: str) -> None:
        self.name = name
        self.waits: list[str] = []

    def wait_stream(self, other: Stream) -> None:
        self.waits.append(other.name)


class Graph:
    """Counts its replays."""

    count = 0

    def replay(self) -> None:
        self.count += 1


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> Stream:
    """The stream that the caller is on, of a `torch.cuda` that launches nothing."""
    stream = Stream("current")

    @contextmanager
    def on(_: Stream) -> Iterator[None]:
        yield

    stubs = {
        "Stream": lambda device: Stream("capture"),
        "CUDAGraph": Graph,
        "graph_pool_handle": lambda: None,
        "current_stream": lambda device: stream,
        "stream": on,
        "graph": lambda graph, **settings: on(graph),
        "empty_cache": lambda: None,
        "mem_get_info": lambda device: (3, 4),
    }
    for name, stub in stubs.items():
        monkeypatch.setattr(torch.cuda, name, stub)
    return stream


def graphs() -> CudaGraphs:
    return CudaGraphs(torch.device("cuda"))


def step_of(error: Exception) -> GraphStep:
    def forward() -> None:
        raise error

    return GraphStep(prepare=lambda: None, forward=forward)


ERRORS = [None, GraphUnsupported("a kernel"), KeyboardInterrupt()]


def session_of(error: BaseException | None) -> None:
    """A session in which nothing may be collected, with an error in it."""
    with graphs().session():
        assert not gc.isenabled()
        if error is not None:
            raise error


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("error", ERRORS)
def test_nothing_is_collected_during_a_session(
    current: Stream, error: BaseException | None, enabled: bool
) -> None:
    (gc.enable if enabled else gc.disable)()
    try:
        with nullcontext() if error is None else pytest.raises(type(error)):
            session_of(error)
        assert gc.isenabled() is enabled
    finally:
        gc.enable()


@pytest.mark.parametrize("error", ERRORS)
def test_the_callers_stream_waits_for_what_was_launched(
    current: Stream, error: BaseException | None
) -> None:
    with nullcontext() if error is None else pytest.raises(type(error)):
        session_of(error)
    assert current.waits == ["capture"]


def test_a_spoilt_capture_says_what_spoilt_it(
    current: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def spoilt(graph: object, **settings: object) -> Iterator[None]:
        try:
            yield
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")

    monkeypatch.setattr(torch.cuda, "graph", spoilt)
    with pytest.raises(GraphUnsupported, match="cannot be captured: not while capturing; a capt"):
        graphs().capture(step_of(RuntimeError("not while capturing")))


def test_random_numbers_are_drawn_again_after_a_spoilt_capture(
    current: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's generator takes part in a capture until one succeeds."""
    ended: list[bool] = []

    @contextmanager
    def capturing(graph: object, **settings: object) -> Iterator[None]:
        ended.append(False)
        yield
        ended[-1] = True

    monkeypatch.setattr(torch.cuda, "graph", capturing)
    with pytest.raises(GraphUnsupported):
        graphs().capture(step_of(RuntimeError("not while capturing")))
    assert ended == [False, True]


def test_memory_that_runs_out_is_no_fault_of_the_step(current: Stream) -> None:
    with pytest.raises(GraphUnsupported, match="no memory is left for graphs: 2 GiB; capture sm"):
        graphs().capture(step_of(torch.OutOfMemoryError("2 GiB")))


def test_other_errors_of_a_step_are_its_own(current: Stream) -> None:
    error = InvalidInput("q", got=None, expected="a tensor")
    with pytest.raises(InvalidInput) as caught:
        graphs().capture(step_of(error))
    assert caught.value is error


def test_a_piece_ends_elsewhere_and_is_replayed(
    current: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []

    @contextmanager
    def capturing(graph: Graph, **settings: object) -> Iterator[None]:
        notes.append(f"begin {settings['capture_error_mode']}")
        yield
        notes.append("end")

    monkeypatch.setattr(torch.cuda, "graph", capturing)
    devices, stack = graphs(), ExitStack()
    first = stack.enter_context(devices.piece())
    stack.close()
    second = stack.enter_context(devices.piece())
    stack.close()
    assert notes == ["begin thread_local", "end"] * 2
    first.replay()
    first.replay()
    second.replay()
    graph_of = [piece.replay.__self__ for piece in (first, second)]  # type: ignore[attr-defined]  # a bound method
    assert [graph.count for graph in graph_of] == [2, 1]


def test_a_piece_that_cannot_be_captured_says_why(current: Stream) -> None:
    with (
        pytest.raises(GraphUnsupported, match="cannot be captured: not while capturing"),
        graphs().piece(),
    ):
        raise RuntimeError("not while capturing")


def test_unowned_tensors_do_not_keep_memory(current: Stream) -> None:
    """Only the address is kept: a graph's pool has the memory."""
    whole = torch.arange(24.0).view(4, 6)
    tensor = whole[1:, 2:5]
    unowned = graphs().unowned(tensor)
    assert torch.equal(unowned, tensor)
    assert unowned.stride() == tensor.stride()
    unowned[0, 0] = 99
    assert whole[1, 2] == 99
    memory = StorageWeakRef(whole.untyped_storage())  # type: ignore[no-untyped-call]  # torch's own
    del whole, tensor
    assert memory.expired()  # type: ignore[no-untyped-call]  # as above


def test_devices_without_pieces_say_so() -> None:
    class Whole(DeviceGraphs):
        session = warm_up = capture = None  # type: ignore[assignment]  # not called

    with pytest.raises(GraphUnsupported, match="Whole captures whole steps"):
        Whole().piece()
    with pytest.raises(GraphUnsupported, match="Whole captures whole steps"):
        Whole().unowned(torch.empty(1))
