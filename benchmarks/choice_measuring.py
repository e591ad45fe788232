"""Measuring as `attnmux bench --keep` does, deciding by that, and measuring again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from benchmarks.choice_workloads import Model

from attnmux.bench.cli.bench_keep import Keeper, Kept
from attnmux.bench.cli.bench_place import Place, find_place
from attnmux.bench.cli.bench_timing import Result, measured
from attnmux.bench.measuring import Bench, Row
from attnmux.bench.workload import Workload, completed
from attnmux.core.choosing.measured.measurement import read_measurements
from attnmux.core.choosing.tell.decision import Decision
from attnmux.core.cli.run import Run
from attnmux.core.cli.select import decided
from attnmux.core.errors import in_brief
from attnmux.core.settings import Settings

Times = Mapping[str, float]
"""Microseconds of one layer's call by the backend's address."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """A step, the backend that was chosen for it, and how long each takes."""

    model: str
    workload: Workload
    chosen: str
    """`plugin/name`."""
    times: Times
    """Of the backends that answered rightly and passed their check, measured after the choice."""

    @property
    def best(self) -> str | None:
        return min(self.times, key=lambda address: self.times[address], default=None)

    def over_best(self, address: str) -> float | None:
        """A backend's time over the best one's; None where it has no time."""
        if self.best is None or address not in self.times:
            return None
        return self.times[address] / self.times[self.best]


@dataclass(frozen=True, kw_only=True, slots=True)
class Measuring:
    """How the steps of a model are measured here."""

    names: Sequence[str] = ()
    """The only backends, where there are any."""
    without: tuple[str, ...] = ()
    """Backends that are neither timed nor chosen."""
    platform: str | None = None
    """A vendor, where several are here."""
    seconds: float = 0.3
    """Least time for one figure."""
    check_seconds: float = 3.0
    """Most time for the check of one backend in one phase."""

    def serve(self, model: Model) -> tuple[list[Served], list[str]]:
        """What serves each step of the model, and what is to be known of backends without a time.

        Measurements stay in a file of their own: neither are the machine's used nor added to.
        """
        with TemporaryDirectory() as folder:
            run, file = Run(), Path(folder) / "measurements.json"
            settings = replace(
                Settings.load(),
                measurements=str(file),
                no_measurements=False,
                deny_backends=self.without,
            )
            place = find_place(run, settings, self.platform, "")
            asked = model.request
            keeper = Keeper.opened(run, settings, asked, place)
            result = measured(
                place,
                completed(asked),
                settings.policy(),
                workloads=model.workloads,
                names=self.names,
                seconds=self.seconds,
                show=False,
            )
            kept = keeper.keep(result, self.check_seconds, show=False)
            known = read_measurements(file).found
            decisions = {
                phase: decided(
                    asked.replace(phases=(phase,)),
                    place.platform,
                    place.offers,
                    settings.policy(),
                    known,
                )
                for phase in dict.fromkeys(each.phase for each in model.workloads)
            }
        again = tuple(_again(result, place, self.seconds))
        times = _times(again, kept)
        served = [
            Served(
                model=model.name,
                workload=each,
                chosen=server_of(decisions[each.phase], each),
                times=times.get(str(each), {}),
            )
            for each in model.workloads
        ]
        return served, [*_told(result.rows), *_told(again), *_refused(kept)]


def server_of(decision: Decision, workload: Workload) -> str:
    """Who serves the step, by its batch size where it decodes."""
    if workload.phase == "decode":
        for each in decision.decode_sizes:
            if each.least <= workload.batch_size <= (each.most or workload.batch_size):
                return each.choice.address
    return decision.phases[workload.phase].address


def _again(result: Result, place: Place, seconds: float) -> Iterable[Row]:
    """The same steps once more: what a choice was made by flatters it."""
    bench = Bench(
        device=torch.device(place.device),
        ceilings=result.ceilings,
        graphs=result.field.graphs,
        seconds=seconds,
    )
    return bench.rows(result.field.workloads, result.field.subjects)


def _times(rows: Iterable[Row], kept: Kept) -> Mapping[str, Times]:
    """By workload."""
    sound = {(each.backend, each.phase) for each in kept.measurements if each.conformant}
    times: dict[str, dict[str, float]] = {}
    for row in rows:
        if row.median_us is not None and (row.backend, row.workload.phase) in sound:
            times.setdefault(str(row.workload), {})[row.backend] = row.median_us
    return times


def _told(rows: Iterable[Row]) -> list[str]:
    return [
        f"{row.backend}, {row.workload}: {row.status}: {row.why}"
        for row in rows
        if row.status != "measured"
    ]


def _refused(kept: Kept) -> list[str]:
    return [
        f"{each.backend}, {each.phase}: not conformant: {each.failure}"
        for each in kept.checks
        if not each.conformant
    ]


def failed(model: Model, error: Exception) -> tuple[list[Served], list[str]]:
    """The steps of a model that could not be measured: no backend has a time."""
    served = [
        Served(model=model.name, workload=each, chosen="-", times={}) for each in model.workloads
    ]
    return served, [f"{model.name}: {in_brief(error)}"]
