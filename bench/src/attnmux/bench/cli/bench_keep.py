"""`attnmux bench --keep`: what was timed, checked and put where the solver reads it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnmux.bench.cli.bench_place import Place
from attnmux.core.choosing.ask.policy import Policy
from attnmux.core.choosing.ask.request import Request
from attnmux.core.choosing.judge.axes import Question
from attnmux.core.choosing.measured.measurement import (
    Measurement,
    measurement_file,
    shape_of,
    versions_of,
)
from attnmux.core.choosing.measured.records import Device
from attnmux.core.choosing.tell.decision import Decision
from attnmux.core.cli.run import Run, writing
from attnmux.core.cli.select import decided
from attnmux.core.errors import SettingsError
from attnmux.core.settings import Settings

if TYPE_CHECKING:
    from attnmux.bench.cli.bench_timing import Result
    from attnmux.bench.conformance import Check
    from attnmux.bench.measuring import Row

OTHERWISE = "name another file as ATTNMUX_MEASUREMENTS, or leave out --keep"
"""Where the file cannot be written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """What came of it."""

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
            "before": _short(self.before),
            "after": _short(self.after),
        }


def _short(decision: Decision) -> dict[str, Any]:
    whole = decision.to_dict()
    return {name: whole[name] for name in ("hash", "page_size", "phases", "decode_sizes")}


@dataclass(frozen=True, kw_only=True, slots=True)
class Keeper:
    """The file, and what is decided before anything is put there."""

    path: Path
    request: Request
    """As asked: a choice goes by what was measured for the same shapes."""
    place: Place
    policy: Policy
    before: Decision

    @classmethod
    def opened(cls, run: Run, settings: Settings, request: Request, place: Place) -> Keeper:
        """Raises SettingsError where nothing could be kept, or would be used, and NoBackend where
        nothing serves the request: timing takes minutes."""
        path = settings.measurements_file()
        if path is None:
            source = settings.sources.get("no_measurements", "no home directory")
            raise SettingsError(
                f"measurements are not used here ({source}): allow them, or leave out --keep"
            )
        with writing(path, otherwise=OTHERWISE):
            measurement_file(path).prepare()
        policy, measurements = settings.policy(), run.measurements(settings)
        before = decided(request, place.platform, place.offers, policy, measurements)
        return cls(path=path, request=request, place=place, policy=policy, before=before)

    def keep(self, result: Result, seconds: float, *, show: bool) -> Kept:
        """Check every backend that was timed, in each of its phases, and keep its figures; `show`:
        with a progress bar.

        A backend that answered wrongly on one workload is not conformant in its phase, whatever the
        suite says.
        """
        checks = tuple(self._checks(result, seconds, show=show))
        measurements = self._measurements(result, checks)
        file = measurement_file(self.path)
        if measurements:
            with writing(self.path, otherwise=OTHERWISE):
                file.add(measurements)
        place, known = self.place, file.read().found
        after = decided(self.request, place.platform, place.offers, self.policy, known)
        return Kept(
            path=self.path,
            checks=checks,
            measurements=measurements,
            before=self.before,
            after=after,
        )

    def _checks(self, result: Result, seconds: float, *, show: bool) -> Iterable[Check]:
        from attnmux.bench.conformance import check_conformance  # noqa: PLC0415  # torch

        timed = {
            (row.backend, row.workload.phase) for row in result.rows if row.status == "measured"
        }
        subjects = [
            each for each in result.field.subjects if (each.offer.address, each.phase) in timed
        ]
        place = self.place
        coming = (
            check_conformance(each, place.device, seconds, place.launches) for each in subjects
        )
        if not show:
            return coming
        from attnmux.bench.cli.bench_report import track  # noqa: PLC0415  # rich, off the JSON path

        return track(coming, len(subjects), "checking")

    def _measurements(self, result: Result, checks: Iterable[Check]) -> tuple[Measurement, ...]:
        platform = self.place.platform
        sound = {(each.backend, each.phase) for each in checks if each.conformant}
        sound -= {(row.backend, row.workload.phase) for row in result.rows if row.status == "wrong"}
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
                versions=versions_of(offers[row.backend]),
                median_us=row.median_us,
                conformant=(row.backend, row.workload.phase) in sound,
                date=now,
            )
            for row in result.rows
            if row.median_us is not None
            for shape in self._shapes(row)
        )

    def _shapes(self, row: Row) -> Iterator[str]:
        """Of what the row answers: what is asked, and the same from graphs if it was timed so."""
        requests = [self.request]
        if row.execution == "graph" and not self.request.graph:
            requests.append(self.request.replace(graph=True))
        for request in requests:
            phase = row.workload.phase
            yield shape_of(Question(request=request, platform=self.place.platform, phase=phase))
