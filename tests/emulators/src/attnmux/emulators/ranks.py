"""Runs a test's function on several ranks: processes of this machine, joined by gloo.

The processes come from a server that has imported torch already, so that a test waits for neither.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

PRELOADED = [
    "torch.distributed",
    "torch._dynamo",  # which recording graphs import
    "attnmux.core",
    "attnmux.distributed",
    "attnmux.testing.fakes.graphs",
    "attnmux.testing.setup.prepared",
    "attnmux.testing.graphs.recording",
    "attnmux.transformers.parallel.data_parallel",  # transformers alone takes seconds
    "pytest",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankResult:
    """The end of one rank."""

    value: Any = None
    """What the function returned."""
    error: str = ""
    """The traceback of what it raised."""
    exit_code: int | None = None
    """Exit code of a process that ended without a word; negative for a signal."""


def run_ranks(
    function: Callable[..., Any],
    size: int,
    folder: Path,
    *args: Any,  # noqa: ANN401  # the function's own
    seconds: float = 60.0,
    deadline: float = 120.0,
) -> list[Any]:
    """Call `function(group, *args)` on `size` ranks. Returns what each of them returned.

    function: of a module's top level; arguments and results are pickled. folder: an empty one.
    seconds: the group's patience. Raises AssertionError with the traceback of a rank that raised,
    that ended, or that did not end within `deadline` seconds.
    """
    results = end_ranks(function, size, folder, *args, seconds=seconds, deadline=deadline)
    for rank, result in enumerate(results):
        ended = None if result.exit_code is None else f"ended with exit code {result.exit_code}"
        problem = result.error or ended
        assert not problem, f"rank {rank}: {problem}"
    return [result.value for result in results]


def end_ranks(
    function: Callable[..., Any],
    size: int,
    folder: Path,
    *args: Any,  # noqa: ANN401  # the function's own
    seconds: float = 60.0,
    deadline: float = 120.0,
) -> list[RankResult]:
    """Run a function as `run_ranks` does, but one of which some ranks are meant to fail."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    source = Path(function.__code__.co_filename)
    processes, pipes = [], []
    for rank in range(size):
        here, there = context.Pipe(duplex=False)
        work = (source, function.__name__, args, rank, size, folder / "store", seconds, there)
        process = context.Process(target=_run, args=work, daemon=True)
        process.start()
        there.close()
        processes.append(process)
        pipes.append(here)
    try:
        return _results(pipes, processes, time.monotonic() + deadline)
    finally:
        for process in processes:
            process.kill()
            process.join()


def die() -> None:
    """End this process as a fault of the machine does: at once, and without a word."""
    os.kill(os.getpid(), signal.SIGKILL)


def _results(
    pipes: Sequence[Connection], processes: Sequence[Any], deadline: float
) -> list[RankResult]:
    found: dict[int, RankResult] = {}
    while len(found) < len(pipes):
        left = [rank for rank in range(len(pipes)) if rank not in found]
        ready = wait([pipes[rank] for rank in left], timeout=max(deadline - time.monotonic(), 0))
        assert ready, f"ranks {left} did not end in time"
        for rank in (rank for rank in left if pipes[rank] in ready):
            try:
                found[rank] = pipes[rank].recv()
            except EOFError:
                processes[rank].join()
                found[rank] = RankResult(exit_code=processes[rank].exitcode)
    return [found[rank] for rank in range(len(pipes))]


def _run(
    source: Path,
    name: str,
    args: Sequence[Any],
    rank: int,
    size: int,
    store: Path,
    seconds: float,
    pipe: Connection,
) -> None:
    # By file: a test's module has a name in its own process alone.
    spec = importlib.util.spec_from_file_location("ranks_of_a_test", source)
    assert spec is not None
    assert spec.loader is not None
    try:
        import torch  # noqa: PLC0415  # the test's own process does without it
        import torch.distributed as dist  # noqa: PLC0415

        from attnmux.distributed import RankGroup  # noqa: PLC0415

        torch.set_num_threads(1)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        dist.init_process_group(
            "gloo",
            init_method=store.as_uri(),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=seconds),
        )
        group = RankGroup.of(dist.group.WORLD, torch.device("cpu"), seconds=seconds)
        result = RankResult(value=getattr(module, name)(group, *args))
    except BaseException:
        result = RankResult(error=traceback.format_exc())
    pipe.send(result)
