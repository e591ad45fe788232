"""Times of calls on the host and on the device, the sides of a comparison by turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import torch

CALLS = 20
"""Eager calls between two waits: fewer than a device queues."""

Call = Callable[[], object]


def host_times(
    sides: Mapping[str, Sequence[Call]], rounds: int, device: torch.device
) -> dict[str, list[float]]:
    """Microseconds on the host of one call of each side, by rounds."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(rounds):
        for name in _order(sides, turn):
            calls = sides[name]
            wait(device)
            start = time.perf_counter()
            for index in range(CALLS):
                calls[index % len(calls)]()
            times[name].append((time.perf_counter() - start) / CALLS * 1e6)
    return times


def graph_times(
    sides: Mapping[str, Sequence[Call]], rounds: int, device: torch.device, repeats: int = 10
) -> dict[str, list[float]]:
    """Microseconds on the device of all calls of each side, from one graph, by rounds."""
    runs = {name: captured(calls, device) for name, calls in sides.items() if calls}
    times: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(rounds):
        for name in _order(sides, turn):
            taken = 0.0 if name not in runs else device_time(runs[name], repeats, device)
            times[name].append(taken / repeats * 1e6)
    return times


def _order(sides: Mapping[str, object], turn: int) -> list[str]:
    """There and back by turns: what a side leaves to the next, in caches and clocks, evens out."""
    names = list(sides)
    return names if turn % 2 == 0 else names[::-1]


def captured(calls: Sequence[Call], device: torch.device) -> Call:
    """One graph of the calls; without a GPU the calls themselves."""

    def run() -> None:
        for call in calls:
            call()

    if device.type != "cuda":
        return run
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch's own
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(3):
        graph.replay()
    return graph.replay


def device_time(run: Call, repeats: int, device: torch.device) -> float:
    """Seconds of `repeats` runs."""
    wait(device)
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(repeats):
            run()
        return time.perf_counter() - start
    first = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's own
    last = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's own
    first.record()
    for _ in range(repeats):
        run()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) / 1e3


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
