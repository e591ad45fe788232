"""Every backend on every workload: whether it answers rightly, and how long it takes."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal

import torch

from attnmux.bench.answers import error_of, most_error
from attnmux.bench.steps import Step, make_step
from attnmux.bench.subjects import Subject
from attnmux.bench.timing import (
    Ceilings,
    Run,
    all_layers,
    all_layers_in_graph,
    current,
    median_us,
)
from attnmux.bench.workload import Workload
from attnmux.core.backend import AttentionBackend
from attnmux.core.building import build
from attnmux.core.choosing.ask.request import Request
from attnmux.core.choosing.measured.launches import TunedLaunch
from attnmux.core.dtypes import torch_dtype
from attnmux.core.errors import in_brief
from attnmux.core.graph.devices import DeviceGraphs

ROUNDS = 3
"""In each, the backends take their turns, so that what slows a device down slows all of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """What a backend came to on a workload."""

    workload: Workload
    backend: str
    """`plugin/name`."""
    status: Literal["measured", "wrong", "failed"]
    """A backend that answers wrongly, or fails, is not timed."""
    page_size: int
    execution: Literal["graph", "eager"]
    median_us: float | None = None
    """Of one layer's call."""
    prepare_us: float | None = None
    """Of what comes before the layers' calls, once a step: metadata, a library's plan. With a graph
    only what runs outside of it counts."""
    share: float | None = None
    """Of what the device reaches: of its bandwidth in decode, of its matrix products in extend."""
    error: float | None = None
    """Norm of the difference from float64 by the norm of what is expected, on sampled queries."""
    why: str = ""
    """What went wrong."""

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "workload": str(self.workload), "phase": self.workload.phase}


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """How steps are timed on one device."""

    device: torch.device
    ceilings: Ceilings
    graphs: DeviceGraphs | None = None
    """None: the device has none, and every step is timed eagerly."""
    seconds: float = 0.3
    """Least time for one figure of one backend on one workload."""
    launches: tuple[TunedLaunch, ...] = ()
    """As `BackendContext.launches`."""

    def rows(self, workloads: Sequence[Workload], subjects: Sequence[Subject]) -> Iterator[Row]:
        """A row for each workload and each subject that serves its phase, one by one."""
        for workload in workloads:
            alike: dict[tuple[int, str], list[Subject]] = {}
            for subject in subjects:
                if subject.phase == workload.phase:
                    decided = subject.decision
                    alike.setdefault((decided.page_size, decided.kv_dtype), []).append(subject)
            for group in alike.values():
                with torch.no_grad(), current(self.device):
                    rows = self._group(workload, group)
                yield from rows
                gc.collect()

    def _group(self, workload: Workload, subjects: Sequence[Subject]) -> list[Row]:
        """Those that read the same pool."""
        try:
            step = make_step(workload, subjects[0].decision.request, self.device)
        except Exception as error:  # memory, above all: whatever it is belongs into the rows
            return [_row(workload, each, "failed", why=in_brief(error)) for each in subjects]
        ready = {each.offer.address: self._ready(step, each) for each in subjects}
        runs = {name: made for name, made in ready.items() if not isinstance(made, Row)}
        rows = [made for made in ready.values() if isinstance(made, Row)]
        times, broken = self._times(runs)
        for name, made in runs.items():
            if name in broken:
                rows.append(_row(workload, made.subject, "failed", why=broken[name]))
                continue
            us = statistics.median(times[name]) / len(step.layers)
            rows.append(
                _row(
                    workload,
                    made.subject,
                    "measured",
                    median_us=us,
                    prepare_us=made.prepare_us,
                    share=self._share(workload, made.subject.decision.request, us),
                    error=made.error,
                )
            )
        return rows

    def _ready(self, step: Step, subject: Subject) -> _Ready | Row:
        """The backend, made and asked once; a row where that went wrong."""
        try:
            decision = subject.decision
            context = step.context(decision.request, decision.platform, self.launches)
            backend = build(decision, context)
            step.out.fill_(torch.nan)
            if subject.in_graph and self.graphs is not None:
                run = all_layers_in_graph(backend, step, self.graphs)
                prepare = partial(backend.init_forward_metadata_out_graph, step.batch)
            else:
                run = all_layers(backend, step)
                prepare = partial(backend.init_forward_metadata, step.batch)
            run()
            error = error_of(step)
            limit = most_error(step, fp8_products=subject.offer.card.fp8_products)
            if error > limit:
                why = f"off by {error:.1e} of the norm, {limit:.1e} at most"
                return _row(step.workload, subject, "wrong", error=error, why=why)
            prepare_us = median_us(prepare, self.seconds / ROUNDS)
            return _Ready(
                run=run, backend=backend, subject=subject, error=error, prepare_us=prepare_us
            )
        except Exception as failure:  # whatever a library, a compiler or a device raises
            return _row(step.workload, subject, "failed", why=in_brief(failure))

    def _times(
        self, runs: Mapping[str, _Ready]
    ) -> tuple[Mapping[str, Sequence[float]], Mapping[str, str]]:
        """Microseconds of all layers by backend and round; what went wrong meanwhile."""
        times: dict[str, list[float]] = {name: [] for name in runs}
        broken: dict[str, str] = {}
        for _ in range(ROUNDS):
            for name, made in runs.items():
                if name in broken:
                    continue
                try:
                    times[name].append(median_us(made.run, self.seconds / ROUNDS))
                except Exception as failure:  # a device that fails says so at the next wait
                    broken[name] = in_brief(failure)
        return times, broken

    def _share(self, workload: Workload, request: Request, us: float) -> float:
        if workload.phase == "decode":
            itemsize = torch_dtype(request.kv_dtype or "").itemsize
            return workload.kv_bytes(request, itemsize) / us / 1e3 / self.ceilings.read_gbs
        return workload.flops(request) / us / 1e6 / self.ceilings.matmul_tflops


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Ready:
    """A backend that answered rightly."""

    run: Run
    backend: AttentionBackend
    """Kept: a graph does not keep what it reads."""
    subject: Subject
    error: float
    prepare_us: float


def _row(
    workload: Workload,
    subject: Subject,
    status: Literal["measured", "wrong", "failed"],
    **figures: Any,  # noqa: ANN401  # fields of Row by name
) -> Row:
    return Row(
        workload=workload,
        backend=subject.offer.address,
        status=status,
        page_size=subject.decision.page_size,
        execution="graph" if subject.in_graph else "eager",
        **figures,
    )
