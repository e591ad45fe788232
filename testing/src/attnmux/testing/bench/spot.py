"""Steps of many shapes on one device: who is timed, and compiled first by several processes."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

import torch

from attnmux.core import (
    AttnmuxError,
    BackendFailed,
    InvalidInput,
    NoBackend,
    Offer,
    Platform,
    Policy,
    Request,
)
from attnmux.testing.bench.conformance import check_conformance
from attnmux.testing.bench.entrants import Entrant, make_field
from attnmux.testing.bench.grid import MEMORY_SHARE
from attnmux.testing.bench.measuring import Bench, Row
from attnmux.testing.bench.roofline import Ceilings
from attnmux.testing.bench.timing import graphs_of
from attnmux.testing.bench.workload import Workload

NO_CEILINGS = Ceilings(read_gbs=1.0, matmul_tflops=1.0)
"""No share of the device is told."""
GENERAL = 500
"""Backends whose prior has this rank or a later one are timed by name alone. They serve if nothing
made for the hardware does, and some compile for a minute for each shape."""

OF_EACH = 3
"""Items that each process compiles before they are timed."""


class Steps(NamedTuple):
    """Steps of one request."""

    asked: Request
    workloads: tuple[Workload, ...]


class HasSteps(Protocol):
    """An item with the steps that are measured in one go."""

    @property
    def steps(self) -> Steps: ...


T = TypeVar("T", bound=HasSteps)


@dataclass(frozen=True, kw_only=True, slots=True)
class Spot:
    """A device, the backends that are timed on it, and for how long. Processes get a copy."""

    platform: Platform
    device: str
    """A torch device."""
    offers: tuple[Offer, ...]
    policy: Policy
    names: tuple[str, ...] = ()
    """The only backends; without any, all with ranks before `GENERAL`."""
    seconds: float
    """Least time for one figure."""
    check_seconds: float = 0.0
    """Most time for the check of a backend in one phase; 0 checks nothing but answers."""

    def entrants(self, steps: Steps) -> Sequence[Entrant]:
        """The backends that are timed on the steps; none where nothing serves them."""
        try:
            field = make_field(
                steps.asked,
                self.platform,
                torch.device(self.device),
                self.offers,
                self.policy,
                workloads=steps.workloads,
                names=self.names,
            )
        except (NoBackend, InvalidInput):
            return ()
        return [each for each in field.entrants if self.names or not _is_general(each)]

    def rows(self, workload: Workload, entrants: Sequence[Entrant]) -> Sequence[Row]:
        """A row for each backend."""
        device = torch.device(self.device)
        bench = Bench(
            device=device, ceilings=NO_CEILINGS, graphs=graphs_of(device), seconds=self.seconds
        )
        return list(bench.rows((workload,), entrants))

    def check_device(self, rows: Sequence[Row]) -> None:
        """Raise BackendFailed if the device no longer answers after the first of the rows failed.

        After an illegal access to memory, all that a process asks of a GPU fails.
        """
        failed = [row for row in rows if row.status == "failed"]
        if not failed:
            return
        try:
            torch.ones(1, device=self.device).item()
        except RuntimeError as error:
            first = failed[0]
            reason = f"{first.why}. {self.device} does not answer since {first.workload}"
            hint = "the same command goes on behind this step; ATTNMUX_DENY_BACKENDS=NAME leaves "
            raise BackendFailed(first.backend, reason, hint=f"{hint}a backend out") from error

    def compile(self, steps: Steps, processes: int) -> str:
        """Run each step once, so that what compilers make is on the disk afterwards. Returns what
        failed, in words: it fails again when it is timed.

        processes: that do so at a time and share the device's memory. Too large steps are left out:
        their kernels are mostly those of smaller ones.
        """
        room = self.platform.memory_bytes * MEMORY_SHARE / processes or float("inf")
        try:
            quick, entrants = replace(self, seconds=1e-4), self.entrants(steps)
            for entrant in entrants if self.check_seconds else ():
                check_conformance(entrant, self.device, self.check_seconds)
            for workload in steps.workloads if entrants else ():
                if 2 * workload.stored_bytes(steps.asked, 2) <= room:
                    quick.rows(workload, entrants)
        except Exception as error:  # whatever a library, a compiler or a device raises
            return AttnmuxError.in_brief(error)
        finally:
            if torch.accelerator.is_available():
                torch.accelerator.empty_cache()
        return ""

    def compiled(self, items: Sequence[T], jobs: int, end: float) -> Iterator[T]:
        """Yield the items in groups that `jobs` processes compile first; without compiling for 0.
        A group has several items for each, so that few of them wait for the slowest.

        end: of `time.monotonic`, when no other group begins. If one of the processes dies, the rest
        compiles when it is timed.
        """
        spawned = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(jobs, mp_context=spawned) if jobs else nullcontext()
        size = OF_EACH * jobs or 1
        with pool as workers:
            for start in range(0, len(items), size):
                if time.monotonic() > end:
                    return
                group = items[start : start + size]
                if workers is not None:
                    compile_one = partial(self.compile, processes=jobs)
                    try:
                        list(workers.map(compile_one, [each.steps for each in group]))
                    except BrokenProcessPool:
                        workers = None
                yield from group


def _is_general(entrant: Entrant) -> bool:
    """Whether a prior says so: a card without priors says nothing."""
    own = [each for each in entrant.decision.candidates if each.address == entrant.offer.address]
    return any((each.rank or 0) >= GENERAL and each.source for each in own)
