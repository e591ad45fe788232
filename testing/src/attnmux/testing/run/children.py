"""Runs cases in child processes, so that a crash or a hang fails one case and not the whole run."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess

from attnmux.testing.cases.linear import AnyCase
from attnmux.testing.run.candidate import Candidate, Outcome

CONTEXT = multiprocessing.get_context("spawn")
"""A forked child cannot use a device that its parent has initialised."""

Trial = tuple[AnyCase, int]
"""A case and the seed of its tensors."""

STARTUP = 120.0
"""Seconds that a child may take to import torch and the backend, before its first case counts."""


@dataclass(kw_only=True, eq=False)
class _Child:
    process: SpawnProcess
    pipe: Connection
    case: AnyCase | None = None
    """The running case; None while the child is idle."""
    since: float = field(default_factory=time.monotonic)
    """When the case began, or the child, until it is ready."""
    is_ready: bool = False

    def deadline(self, timeout: float) -> float:
        return self.since + (timeout if self.is_ready else STARTUP + timeout)

    def start(self, trial: Trial) -> None:
        self.case, self.since = trial[0], time.monotonic()
        # A thread of a library may have ended the idle process; `_answer` then finds that out
        with suppress(OSError):
            self.pipe.send(trial)

    def stop(self) -> None:
        self.pipe.close()
        self.process.kill()
        self.process.join()


def run_in_children(
    candidate: Candidate, trials: Iterator[Trial], *, jobs: int, timeout: float
) -> Iterator[Outcome]:
    """Run `jobs` trials at a time and yield each outcome as it arrives.

    A case fails if its child exits before it answers or takes longer than `timeout` seconds, not
    counting the imports of a new child. A new child then runs the remaining trials. The next trial
    is drawn when a child is free.
    """
    children: list[_Child] = []
    try:
        while True:
            _start_free(candidate, trials, children, jobs)
            busy = [child for child in children if child.case is not None]
            if not busy:
                return
            for child in busy:
                outcome = _answer(child, timeout)
                if outcome is None:
                    continue
                yield outcome
                child.case = None
                if outcome.status == "failed" and not child.process.is_alive():
                    children.remove(child)
            if all(child.case is not None for child in busy):
                first = min(child.deadline(timeout) for child in busy) - time.monotonic()
                wait([child.pipe for child in busy], timeout=max(first, 0.01))
    finally:
        for child in children:
            child.stop()


def _start_free(
    candidate: Candidate, trials: Iterator[Trial], children: list[_Child], jobs: int
) -> None:
    """Give each free child a trial, after spawning those that are missing."""
    free = [child for child in children if child.case is None]
    while free or len(children) < jobs:
        trial = next(trials, None)
        if trial is None:
            return
        if not free:
            free.append(_spawn(candidate, jobs))
            children.append(free[-1])
        free.pop().start(trial)


def _answer(child: _Child, timeout: float) -> Outcome | None:
    """The outcome of the child's case; None while it runs."""
    try:
        if not child.is_ready and child.pipe.poll():
            child.pipe.recv()
            child.is_ready, child.since = True, time.monotonic()
        if child.pipe.poll():
            outcome: Outcome = child.pipe.recv()
            return outcome
    except (EOFError, OSError):
        child.process.join()
        return _lost(child, f"its process ended with {_cause(child.process.exitcode)}")
    if time.monotonic() > child.deadline(timeout):
        child.stop()
        if not child.is_ready:
            return _lost(child, f"its process did not start within {STARTUP + timeout:g} seconds")
        return _lost(child, f"it took longer than {timeout:g} seconds")
    return None


def _lost(child: _Child, message: str) -> Outcome:
    case = child.case
    assert case is not None  # only busy children are polled
    return Outcome(case=case.name, execution=case.execution, status="failed", message=message)


def _cause(code: int | None) -> str:
    if code is not None and code < 0:
        return signal.Signals(-code).name
    return f"exit status {code}"


def _spawn(candidate: Candidate, jobs: int) -> _Child:
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=_serve, args=(candidate, theirs, jobs), daemon=True)
    process.start()
    theirs.close()
    return _Child(process=process, pipe=ours)


def _serve(candidate: Candidate, pipe: Connection, jobs: int) -> None:
    """Say that it is ready, then run cases until the parent closes its end.

    `jobs` children share the threads: with all of them each, threads of one wait for another's.
    """
    import torch  # noqa: PLC0415  # in the child alone

    from attnmux.testing.run.runner import run_case  # noqa: PLC0415  # as above

    torch.set_num_threads(max(1, torch.get_num_threads() // jobs))
    with suppress(OSError):  # the parent may be gone
        pipe.send(None)
    while True:
        try:
            case, seed = pipe.recv()
        except EOFError:
            return
        # A backend's exception need not be picklable
        pipe.send(replace(run_case(candidate, case, seed=seed), error=None))
