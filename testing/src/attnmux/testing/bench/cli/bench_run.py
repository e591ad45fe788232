"""One run of `attnmux bench`: where it times, what it measures, and what `--keep` stores."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from attnmux.core import (
    Decision,
    InvalidInput,
    Measurement,
    NoBackend,
    Offer,
    Platform,
    Policy,
    Request,
    Settings,
    SettingsError,
    TunedLaunch,
    solve_measured,
    torch_dtype,
)
from attnmux.core.verbs import (
    Device,
    Question,
    Run,
    machine,
    writing,
)
from attnmux.testing.bench.cli.asked import other_device
from attnmux.testing.bench.cli.progress import Bar
from attnmux.testing.bench.conformance import Check, check_conformance
from attnmux.testing.bench.entrants import Entrant, Field, make_field
from attnmux.testing.bench.keeping import RecordFile
from attnmux.testing.bench.margins import Margin, margins
from attnmux.testing.bench.measuring import Bench, Row
from attnmux.testing.bench.ranks import joined, shared_launches, together_on
from attnmux.testing.bench.roofline import Ceilings, ceilings
from attnmux.testing.bench.rounding import rounding_error
from attnmux.testing.bench.workload import Workload

if TYPE_CHECKING:
    from attnmux.distributed import RankGroup

OTHERWISE = "name another file as ATTNMUX_MEASUREMENTS, or leave out --keep"
"""Advice for a file that cannot be written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A device of this machine, and the backends that the plugins offer."""

    platform: Platform
    device: str
    """A torch device."""
    offers: tuple[Offer, ...]
    launches: tuple[TunedLaunch, ...] = ()
    """See `BackendContext.launches`."""
    ranks: RankGroup | None = None
    """Processes that measure together, each on a device of its own; None for one alone."""

    @property
    def tells(self) -> bool:
        """Whether this process prints and stores what was measured: rank 0 does for all."""
        return self.ranks is None or self.ranks.rank == 0

    def __str__(self) -> str:
        return self.platform.name or str(self.platform)


def find_place(run: Run, settings: Settings, platform: str | None, device: str) -> Place:
    """Joins the ranks that a launcher started. Raises InvalidInput for a machine that is not here,
    for another platform's device, for a device that is named for several ranks, and for several
    ranks without attnmux-distributed; RanksDiffer where these have other plugins or libraries."""
    plugins = run.plugins(settings)
    here = machine(run, settings, plugins, platform, elsewhere=False, device=device)
    if not here.is_here:
        raise InvalidInput("--platform", got=platform, expected="a vendor that is on this machine")
    if device and device.partition(":")[0] != here.device_type:
        raise other_device(device, here)
    ranks = joined(here.device_type, device)
    launches = run.launches(settings)
    if ranks is not None:
        device, launches = str(ranks.device), shared_launches(ranks, plugins.offers(), launches)
    return Place(
        platform=here,
        device=device or here.device_type,
        offers=plugins.offers(),
        launches=launches,
        ranks=ranks,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """The figures, and the backends without figures."""

    place: Place
    request: Request
    ceilings: Ceilings
    field: Field
    rows: tuple[Row, ...]
    decision: Decision | None
    """The choice before these figures; None where no backends serve all phases."""

    @property
    def margins(self) -> tuple[Margin, ...]:
        return margins(self.rows, self.decision)

    @property
    def rounding(self) -> dict[str, float]:
        """By dtype what rounding K and V to it changes, where the pool does not have that of Q."""
        dtypes = self.request.kv_dtype, self.request.dtype
        if None in dtypes or dtypes[0] == dtypes[1]:
            return {}
        return {each: rounding_error(self.request, each) for each in dtypes if each}

    def to_dict(self) -> dict[str, Any]:
        return {
            "platform": self.place.platform.to_dict(),
            "device": self.place.device,
            "request": self.request.to_dict(),
            "rounding": self.rounding,
            "ceilings": asdict(self.ceilings),
            "rows": [row.to_dict() for row in self.rows],
            "margins": [margin.to_dict() for margin in self.margins],
            "refused": [
                {
                    "backend": each.offer.address,
                    "phase": each.phase,
                    "reasons": [reason.to_dict() for reason in each.reasons],
                }
                for each in self.field.refused
            ],
        }


def measure(
    place: Place,
    request: Request,
    policy: Policy,
    *,
    workloads: Sequence[Workload],
    names: Sequence[str],
    seconds: float,
    measurements: Sequence[Measurement] = (),
    bar: Bar | None = None,
) -> Result:
    """Time all backends on all workloads. Raises like `make_field`.

    measurements: those of this machine, which the choice follows.
    """
    bar = bar or Bar(hidden=True)
    device = torch.device(place.device)
    field = make_field(
        request,
        place.platform,
        device,
        place.offers,
        policy,
        workloads=workloads,
        names=names,
    )
    dtype = torch_dtype(request.dtype or "")
    (reached,) = bar.track(
        (ceilings(device, dtype, seconds) for _ in range(1)),
        f"measuring the bandwidth and the products of {place}",
    )
    bench = Bench(
        device=device,
        ceilings=reached,
        graphs=field.graphs,
        seconds=seconds,
        launches=place.launches,
        together=together_on(place.ranks),
        say=bar.say,
    )
    rows = bench.rows(field.workloads, field.entrants)
    timed = tuple(bar.track(rows, f"timing on {place}", field.size))
    if any(row.is_beyond for row in timed):
        reached = reached.or_higher(ceilings(device, dtype, seconds))
        timed = tuple(row.under(reached) for row in timed)
    try:
        decision = solve_measured(
            request, place.platform, place.offers, policy, measurements=measurements
        )
    except NoBackend:
        decision = None
    return Result(
        place=place,
        request=request,
        ceilings=reached,
        field=field,
        rows=timed,
        decision=decision,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """The result of `--keep`, and its effect on the choice."""

    path: Path
    checks: tuple[Check, ...]
    measurements: tuple[Measurement, ...]
    before: Decision
    after: Decision

    def to_dict(self) -> dict[str, Any]:
        return {
            "file": str(self.path),
            "checks": [{**asdict(each), "conformant": each.conformant} for each in self.checks],
            "measurements": [each.to_dict() for each in self.measurements],
            "before": _summary(self.before),
            "after": _summary(self.after),
        }


def _summary(decision: Decision) -> dict[str, Any]:
    whole = decision.to_dict()
    return {name: whole[name] for name in ("hash", "page_size", "phases", "decode_sizes")}


@dataclass(frozen=True, kw_only=True, slots=True)
class Keeper:
    """The file of measurements, and its contents and the decision before anything is stored."""

    path: Path
    request: Request
    """The request as asked: a choice follows measurements of the same shapes."""
    place: Place
    policy: Policy
    known: tuple[Measurement, ...]
    before: Decision

    @classmethod
    def open(cls, run: Run, settings: Settings, request: Request, place: Place) -> Keeper:
        """Check, before minutes of timing, that measurements can be stored and will be used.

        Raises SettingsError where they cannot, and NoBackend where nothing serves the request.
        """
        path = settings.measurements_file()
        if path is None:
            source = settings.sources.get("no_measurements", "no home directory")
            raise SettingsError(
                f"measurements are not used here ({source}): allow them, or leave out --keep"
            )
        if place.tells:
            with writing(path, otherwise=OTHERWISE):
                RecordFile(path, Measurement).prepare()
        policy, known = settings.policy(), run.measurements(settings)
        before = solve_measured(request, place.platform, place.offers, policy, measurements=known)
        return cls(
            path=path, request=request, place=place, policy=policy, known=known, before=before
        )

    def keep(self, result: Result, seconds: float, bar: Bar | None = None) -> Kept:
        """Check every backend in each phase in which it was timed, and store its figures.

        A backend with a wrong answer on one workload is not conformant in that phase, whatever the
        suite says. seconds: most time for one check.
        """
        checks = self._checks(result, seconds, bar or Bar(hidden=True))
        measurements = self._measurements(result, checks)
        file = RecordFile(self.path, Measurement)
        if measurements and self.place.tells:
            with writing(self.path, otherwise=OTHERWISE):
                file.add(measurements)
        place, known = self.place, file.read().found
        after = solve_measured(
            self.request, place.platform, place.offers, self.policy, measurements=known
        )
        return Kept(
            path=self.path,
            checks=checks,
            measurements=measurements,
            before=self.before,
            after=after,
        )

    def _checks(self, result: Result, seconds: float, bar: Bar) -> tuple[Check, ...]:
        timed = {
            (row.backend, row.workload.phase) for row in result.rows if row.status == "measured"
        }
        entrants = [
            each for each in result.field.entrants if (each.offer.address, each.phase) in timed
        ]
        place, together = self.place, together_on(self.place.ranks)

        def check(entrant: Entrant) -> Check:
            bar.say(f"checking {entrant.offer.address} for {entrant.phase}")

            def checked() -> tuple[Check, tuple[bool]]:
                found = check_conformance(entrant, place.device, seconds, place.launches)
                return found, (not found.conformant,)

            found, (fails,) = together(checked)
            if fails and found.conformant:
                return replace(found, failure="it is not conformant on another rank")
            return found

        return tuple(bar.track(map(check, entrants), "checking", len(entrants)))

    def _measurements(self, result: Result, checks: Iterable[Check]) -> tuple[Measurement, ...]:
        platform = self.place.platform
        conformant = {(each.backend, each.phase) for each in checks if each.conformant}
        conformant -= {
            (row.backend, row.workload.phase) for row in result.rows if row.status == "wrong"
        }
        offers = {offer.address: offer for offer in self.place.offers}
        now, device = datetime.now(timezone.utc), Device.of(platform)
        return tuple(
            Measurement(
                backend=row.backend,
                phase=row.workload.phase,
                shape=shape,
                workload=str(row.workload),
                batch_size=row.workload.batch_size if row.workload.phase == "decode" else None,
                device=device,
                versions=offers[row.backend].versions(),
                median_us=row.median_us,
                rms_error=row.rms_error,
                worst_error=row.worst_error,
                conformant=(row.backend, row.workload.phase) in conformant,
                date=now,
            )
            for row in result.rows
            if row.median_us is not None
            for shape in self._shapes(row)
        )

    def _shapes(self, row: Row) -> Iterator[str]:
        """Yield the request's shape, and the same with graphs where the row was timed in one."""
        requests = [self.request]
        if row.execution == "graph" and not self.request.graph:
            requests.append(self.request.replace(graph=True))
        for request in requests:
            phase = row.workload.phase
            yield Measurement.shape_of(
                Question(request=request, platform=self.place.platform, phase=phase)
            )
