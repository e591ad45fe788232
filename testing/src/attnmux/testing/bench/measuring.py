"""Times every backend on every workload, after checking its answer."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal

import torch

from attnmux.core import AttnmuxError, DeviceGraphs, RankError, TunedLaunch
from attnmux.testing import Errors
from attnmux.testing.bench.entrants import Entrant
from attnmux.testing.bench.ranks import Together
from attnmux.testing.bench.roofline import BEYOND, Ceilings, Cost, cost_of
from attnmux.testing.bench.subjects import AnyBackend, Subject, TimedStep, subject_of
from attnmux.testing.bench.timing import Run, current, in_graph, in_turn, interleave, median_us
from attnmux.testing.bench.workload import Workload

ROUNDS = 3
"""Rounds in which the backends take turns, so that a slower device slows all of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """The result of one backend on one workload."""

    workload: Workload
    backend: str
    """`plugin/name`."""
    status: Literal["measured", "wrong", "failed"]
    """A backend whose answer is wrong, or that fails, is not timed."""
    page_size: int
    execution: Literal["graph", "eager"]
    median_us: float | None = None
    """Microseconds of one layer's call."""
    rounds_us: tuple[float, ...] = ()
    """The same in each of the rounds, whose median it is."""
    prepare_us: float | None = None
    """Microseconds, once a step, before the layers' calls: metadata, a library's plan. With a graph
    only the part outside of it counts."""
    cost: Cost | None = None
    """Arithmetic and memory traffic of one layer's call."""
    share: float | None = None
    """Share of what the device reached in the same run, as `Ceilings.share`."""
    error: float | None = None
    """Relative error against float64 on sampled queries, by norm."""
    rms_error: float | None = None
    """The same in units of the output format's rounding: see `attnmux.testing.Errors`."""
    worst_error: float | None = None
    """The largest such error of one query and head."""
    why: str = ""
    """The error, if there was one."""

    @property
    def is_beyond(self) -> bool:
        """Whether it is faster than the ceiling that was measured."""
        return (self.share or 0) > BEYOND

    def under(self, ceilings: Ceilings) -> Row:
        """The row with its share of these ceilings."""
        if self.cost is None or self.median_us is None:
            return self
        return replace(self, share=ceilings.share(self.cost, self.median_us))

    def to_dict(self) -> dict[str, Any]:
        """Plain data. An infinite error, which JSON cannot hold, is None; `why` has it."""
        data = {**asdict(self), "workload": str(self.workload), "phase": self.workload.phase}
        return {name: None if value == float("inf") else value for name, value in data.items()}


def _silent(what: str) -> None:
    """Say nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """Times steps on one device."""

    device: torch.device
    ceilings: Ceilings
    graphs: DeviceGraphs | None = None
    """None for a device without graphs: every step is timed eagerly."""
    seconds: float = 0.3
    """Least time for one figure of one backend on one workload."""
    launches: tuple[TunedLaunch, ...] = ()
    """See `BackendContext.launches`."""
    together: Together = Together()  # noqa: RUF009  # without state
    """Called for every figure, so that the ranks of a group measure at the same time and all of
    them get the figure of the slowest."""
    say: Callable[[str], None] = _silent
    """Called with a few words before anything is compiled or timed."""

    def rows(self, workloads: Sequence[Workload], entrants: Sequence[Entrant]) -> Iterator[Row]:
        """Yield a row for each pair of a workload and a backend that serves its phase."""
        for workload in workloads:
            groups: dict[tuple[int, str], list[Entrant]] = {}
            for entrant in entrants:
                if entrant.phase == workload.phase:
                    decided = entrant.decision
                    groups.setdefault((decided.page_size, decided.kv_dtype), []).append(entrant)
            for group in groups.values():
                with torch.no_grad(), current(self.device):
                    rows = self._group(workload, group)
                yield from rows
                gc.collect()

    def _group(self, workload: Workload, entrants: Sequence[Entrant]) -> list[Row]:
        """Rows of backends that read the same pool."""
        decision = entrants[0].decision
        request, subject = decision.request, subject_of(decision.request)
        self.say(f"filling the pool of {workload}")
        try:
            step, _ = self.together(
                lambda: (subject.make_step(workload, decision, self.device), ())
            )
        except RankError:
            raise
        except Exception as error:  # mostly memory; any failure belongs in the rows
            return [
                _row(workload, each, "failed", why=AttnmuxError.in_brief(error))
                for each in entrants
            ]
        prepared = {each.offer.address: self._prepare(subject, step, each) for each in entrants}
        ready = {name: made for name, made in prepared.items() if not isinstance(made, Row)}
        rows = [made for made in prepared.values() if isinstance(made, Row)]
        times = interleave(
            {name: partial(self._time, made, workload) for name, made in ready.items()},
            ROUNDS,
            keep_going=True,  # a device that fails says so at the next wait
        )
        cost = cost_of(workload, request)
        for name, made in ready.items():
            if name in times.failures:
                rows.append(_row(workload, made.entrant, "failed", why=times.failures[name]))
                continue
            us = times.median(name) / len(step.layers)
            rows.append(
                _row(
                    workload,
                    made.entrant,
                    "measured",
                    median_us=us,
                    rounds_us=tuple(each / len(step.layers) for each in times.us[name]),
                    prepare_us=made.prepare_us,
                    cost=cost,
                    share=self.ceilings.share(cost, us),
                    **_figures(made.errors),
                )
            )
        return rows

    def _time(self, made: _Ready, workload: Workload) -> float:
        """Microseconds of a run of all layers, in one round."""
        self.say(f"timing {made.entrant.offer.address} on {workload}")
        return self._median_us(made.run)

    def _median_us(self, run: Run) -> float:
        _, (us,) = self.together(lambda: (None, (median_us(run, self.seconds / ROUNDS),)))
        return us

    def _prepare(self, subject: Subject[Any], step: TimedStep, entrant: Entrant) -> _Ready | Row:
        """Build the backend and check its answer. Returns a row where that went wrong."""
        self.say(f"compiling {entrant.offer.address} for {step.workload}")
        try:
            made, figures = self.together(lambda: self._run(subject, step, entrant))
            backend, run, prepare = made
            errors = Errors(*figures)
            options = entrant.choice.options
            limit = subject.limit(step, entrant.offer.card.has_fp8_products(options))
            if errors.relative > limit:
                why = f"off by {errors.relative:.1e} of the norm, {limit:.1e} at most"
                return _row(step.workload, entrant, "wrong", **_figures(errors), why=why)
            prepare_us = self._median_us(prepare)
            return _Ready(
                run=run, backend=backend, entrant=entrant, errors=errors, prepare_us=prepare_us
            )
        except RankError:
            raise
        except Exception as failure:  # whatever a library, a compiler or a device raises
            return _row(step.workload, entrant, "failed", why=AttnmuxError.in_brief(failure))

    def _run(
        self, subject: Subject[Any], step: TimedStep, entrant: Entrant
    ) -> tuple[tuple[AnyBackend, Run, Run], Errors]:
        """Run the step once. Returns the backend, the run, its preparation, and the errors."""
        backend = subject.build(entrant.decision, step, self.launches)
        if entrant.in_graph and self.graphs is not None:
            run = all_layers_in_graph(backend, step, self.graphs)
            prepare = partial(backend.init_forward_metadata_out_graph, step.batch)
        else:
            run = all_layers(backend, step)
            prepare = partial(backend.init_forward_metadata, step.batch)
        step.reset()
        run()
        return (backend, run, prepare), subject.errors(step)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Ready:
    """A backend with a right answer, ready to be timed."""

    run: Run
    backend: AnyBackend
    """Kept alive: a graph does not own the memory that it reads."""
    entrant: Entrant
    errors: Errors
    prepare_us: float


def _figures(errors: Errors) -> dict[str, float]:
    return {"error": errors.relative, "rms_error": errors.rms, "worst_error": errors.worst}


def all_layers(backend: AnyBackend, step: TimedStep) -> Run:
    """Every layer's call, one after the other, eagerly. Prepares the step, once."""
    backend.init_forward_metadata(step.batch)
    return in_turn(step.calls(backend))


def all_layers_in_graph(backend: AnyBackend, step: TimedStep, graphs: DeviceGraphs) -> Run:
    """The same calls from one graph. Prepares the step, once, outside of the graph; before each
    replay, where the device's graphs want that.

    Raises GraphUnsupported for a backend that cannot be captured.
    """
    batch = step.batch
    with torch.inference_mode(False):
        backend.init_cuda_graph_state(batch.batch_size, batch.num_tokens)
        backend.init_forward_metadata_out_graph(batch, in_capture=True)
        backend.init_forward_metadata_in_graph(batch)
        replay = in_graph(
            in_turn(step.calls(backend)),
            graphs,
            renew=lambda: backend.init_forward_metadata_out_graph(batch),
        )
    backend.init_forward_metadata_out_graph(batch)
    backend.init_forward_metadata_in_graph(batch)
    return replay


def _row(
    workload: Workload,
    entrant: Entrant,
    status: Literal["measured", "wrong", "failed"],
    **figures: Any,  # noqa: ANN401  # fields of Row by name
) -> Row:
    return Row(
        workload=workload,
        backend=entrant.offer.address,
        status=status,
        page_size=entrant.decision.page_size,
        execution="graph" if entrant.in_graph else "eager",
        **figures,
    )
