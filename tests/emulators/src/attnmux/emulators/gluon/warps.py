"""Groups of warps as threads of Python, and the barriers that they wait at."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from attnmux.emulators.gluon.values import Pointer, Room, load, raw

PATIENCE = 60
"""Seconds that a thread waits at a barrier."""


class Here(threading.local):
    """Where a thread is."""

    program: tuple[int, int, int] = (0, 0, 0)
    num_warps = 4
    failures: Sequence[BaseException] = ()
    """Failures of the program's threads."""


HERE = Here()


class Barriers:
    """Barriers in shared memory."""

    def __init__(self, count: int) -> None:
        self.all = [Barrier() for _ in range(count)]

    def index(self, at: Any) -> Barrier:
        return self.all[int(raw(at))]


class Barrier:
    def __init__(self) -> None:
        self.needed = self.missing = 0
        self.completed = 0
        self.changed = threading.Condition()


class MBarrier:
    MBarrierLayout = staticmethod(lambda: Barriers)

    @staticmethod
    def init(barrier: Barrier, count: int) -> None:
        barrier.needed = barrier.missing = int(count)

    @staticmethod
    def wait(barrier: Barrier, phase: Any, pred: Any = True) -> None:
        if not raw(pred):
            return
        parity, failures = int(raw(phase)), HERE.failures
        with barrier.changed:
            for _ in range(PATIENCE):
                if barrier.changed.wait_for(lambda: barrier.completed % 2 != parity, 1.0):
                    return
                if failures:
                    break
        raise TimeoutError("a barrier is never completed")

    @staticmethod
    def arrive(barrier: Barrier, count: int = 1) -> None:
        with barrier.changed:
            assert barrier.missing >= count, "more arrivals than a barrier was made for"
            barrier.missing -= count
            if not barrier.missing:
                barrier.completed += 1
                barrier.missing = barrier.needed
                barrier.changed.notify_all()


def copy_to_shared(to: Room, places: Pointer, mask: Any = None) -> None:
    to.store(load(places, mask, None if mask is None else 0.0))


class AsyncCopy:
    @staticmethod
    def mbarrier_arrive(barrier: Barrier, increment_count: bool = True) -> None:
        assert not increment_count
        MBarrier.arrive(barrier, 32 * HERE.num_warps)


def warp_specialize(
    parts: Sequence[tuple[Callable[..., object], Sequence[Any]]],
    warps: Sequence[int],
    registers: Sequence[int],
) -> None:
    failures: list[BaseException] = []
    program = HERE.program

    def run(part: Callable[..., object], given: Sequence[Any], num_warps: int) -> None:
        HERE.program, HERE.num_warps, HERE.failures = program, num_warps, failures
        try:
            part(*given)
        except BaseException as error:
            failures.append(error)

    threads = [
        threading.Thread(target=run, args=(*part, num_warps), daemon=True)
        for part, num_warps in zip(parts, (4, *warps), strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
