"""How long calls take on the host and on a device, the sides of a comparison by turns."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch.utils.benchmark import Timer

from attnmux.core import (
    AttnmuxError,
    DeviceGraphs,
    GraphUnsupported,
    InvalidInput,
    RankError,
)
from attnmux.core.plugin import CapturedGraph, GraphStep

Run = Callable[[], object]
Meter = Callable[[], float]
"""Times one side once, in microseconds."""

CALLS = 20
"""Eager calls between two waits: fewer than a device queues."""

BLOCKS = 3
"""Blocks of runs whose median is a figure, with a wait after each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Times:
    """Microseconds of each side by round, all sides measured in each round."""

    us: Mapping[str, Sequence[float]]
    failures: Mapping[str, str] = field(default_factory=dict)
    """Sides that failed while they were timed, and why."""

    def median(self, side: str) -> float:
        return statistics.median(self.us[side])

    def ratio(self, side: str, over: str) -> float:
        """Median of the rounds' own ratios."""
        pairs = zip(self.us[side], self.us[over], strict=True)
        return statistics.median(mine / other for mine, other in pairs)

    def added(self, side: str, to: str) -> float:
        """Median of the rounds' own differences, in microseconds."""
        pairs = zip(self.us[side], self.us[to], strict=True)
        return statistics.median(mine - other for mine, other in pairs)


def interleave(
    meters: Mapping[str, Meter], rounds: int, *, warm_up: int = 0, keep_going: bool = False
) -> Times:
    """Time each side once a round, so that a disturbance hits all sides.

    Rounds alternate the order of the sides: what one leaves in caches and clocks evens out.
    warm_up: rounds before the first that counts. keep_going: leave out a side that raises, and
    keep its error.
    """
    us: dict[str, list[float]] = {side: [] for side in meters}
    failures: dict[str, str] = {}
    for turn in range(warm_up + rounds):
        sides = list(meters) if turn % 2 == 0 else list(meters)[::-1]
        for side in sides:
            if side in failures:
                continue
            try:
                taken = meters[side]()
            except RankError:
                raise
            except Exception as error:
                if not keep_going:
                    raise
                failures[side] = AttnmuxError.in_brief(error)
                continue
            if turn >= warm_up:
                us[side].append(taken)
    return Times(us=us, failures=failures)


def host_meter(calls: Sequence[Run], device: torch.device, count: int = CALLS) -> Meter:
    """Wall time of one eager call, without waiting for the device: the mean of `count` calls."""

    def measure() -> float:
        wait(device)
        start = time.perf_counter()
        for index in range(count):
            calls[index % len(calls)]()
        return (time.perf_counter() - start) / count * 1e6

    return measure


def wall_meter(run: Run, device: torch.device, repeats: int = 1) -> Meter:
    """Wall time of one run, the device's work included: the mean of `repeats` runs."""

    def measure() -> float:
        wait(device)
        start = time.perf_counter()
        for _ in range(repeats):
            run()
        wait(device)
        return (time.perf_counter() - start) / repeats * 1e6

    return measure


def device_meter(run: Run, device: torch.device, repeats: int = 10) -> Meter:
    """Device time of one run, by CUDA events; wall time on other devices. The mean of `repeats`."""
    if device.type != "cuda":
        return wall_meter(run, device, repeats)

    def measure() -> float:
        first = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's own
        last = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's own
        wait(device)
        first.record()
        for _ in range(repeats):
            run()
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) / repeats * 1e3

    return measure


def median_us(run: Run, seconds: float) -> float:
    """Median microseconds of one run, the device's work included, in about `seconds`.

    Runs of a block follow each other without a wait, and a block is one run if that takes longer.
    """
    timer = Timer("run()", globals={"run": run}, num_threads=torch.get_num_threads())
    number = max(1, math.ceil(seconds / BLOCKS / timer.timeit(1).mean))
    return statistics.median(timer.timeit(number).mean for _ in range(BLOCKS)) * 1e6


def in_turn(calls: Sequence[Run]) -> Run:
    """One run of all calls in order."""

    def run() -> None:
        for call in calls:
            call()

    return run


@dataclass(frozen=True, kw_only=True, slots=True)
class _Replay:
    """Keeps what was captured alive: the graph reads its memory."""

    captured: CapturedGraph
    run: Run
    renew: Run | None

    def __call__(self) -> None:
        if self.renew is not None:
            self.renew()
        self.captured.replay()


def in_graph(run: Run, graphs: DeviceGraphs | None, renew: Run | None = None) -> Run:
    """The replay of one graph of the run; the run itself for a device without graphs.

    renew: called before each replay of a graph that cannot run twice without.
    Raises GraphUnsupported for a run that cannot be captured.
    """
    if graphs is None:
        return run
    step = GraphStep(prepare=lambda: None, forward=run)
    with torch.inference_mode(False), graphs.session():
        for _ in range(graphs.NUM_WARM_UPS):
            graphs.warm_up(step)
        captured = graphs.capture(step)
    if renew is None and not captured.repeats:
        raise GraphUnsupported("the graph cannot run twice without another preparation between")
    return _Replay(captured=captured, run=run, renew=None if captured.repeats else renew)


def graphs_of(device: torch.device) -> DeviceGraphs | None:
    """None for a device without graphs. Raises InvalidInput for one that torch does not have."""
    try:
        torch.empty(1, device=device)
        return DeviceGraphs.of(device)
    except GraphUnsupported:
        return None
    except (RuntimeError, AssertionError, ImportError) as error:
        expected = f"a device of this torch: {error}"
        raise InvalidInput("device", got=str(device), expected=expected) from error


def wait(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def current(device: torch.device) -> AbstractContextManager[object]:
    """Make the device torch's current one, for which `median_us` waits."""
    return nullcontext() if device.type == "cpu" else torch.accelerator.device_index(device.index)
