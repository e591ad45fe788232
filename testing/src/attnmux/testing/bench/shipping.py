"""Measuring what a plugin carries: figures of this kind of device, in a file that grows."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from itertools import islice
from pathlib import Path

from filelock import FileLock
from packaging.requirements import Requirement

from attnmux.core import InvalidInput, Offer
from attnmux.core.plugin import Figures, Files
from attnmux.core.verbs import Device, Shape, Shipped, Source
from attnmux.testing.bench.conformance import check_conformance
from attnmux.testing.bench.entrants import Entrant
from attnmux.testing.bench.keeping import LOCK_SECONDS
from attnmux.testing.bench.measuring import Row
from attnmux.testing.bench.recipe import Task, tasks
from attnmux.testing.bench.spot import Spot
from attnmux.testing.bench.workload import Workload


@dataclass(kw_only=True, slots=True)
class Shipping:
    """The figures so far, and the file that they are in.

    A run that ends early leaves what it measured; the next one goes on behind it. Processes with
    different shares write one file.
    """

    spot: Spot
    file: Path
    command: str
    share: tuple[int, int] = (0, 1)
    """Which of how many equal parts of the tasks this process measures."""
    sources: dict[str, Source] = field(default_factory=dict)
    """By address, in the order of the file."""
    shapes: dict[str, tuple[Shape, dict[str, dict[str, float]]]] = field(default_factory=dict)
    """By name: the shape, and its times by workload and address."""
    refused: dict[tuple[str, str], str] = field(default_factory=dict)
    """By address and what was checked: why the backend is not timed."""
    notes: list[str] = field(default_factory=list)
    """Answers that were wrong, and steps that failed."""

    @classmethod
    def open(
        cls, spot: Spot, path: Path, command: str, share: tuple[int, int] = (0, 1)
    ) -> Shipping:
        """path: a file named for the device, or a folder for it. An empty file is a new one.

        Raises InvalidInput for another name, for a file that cannot be read, and for one that was
        measured with other versions.
        """
        name = Figures.name_for(spot.platform)
        file = path / name if path.is_dir() else path
        if file.name != name:
            raise InvalidInput("--ship", got=str(path), expected=f"a folder, or {name}")
        shipping = cls(spot=spot, file=file, command=command, share=share)
        shipping._take_over()
        return shipping

    def _take_over(self) -> None:
        """Add what the file has: an earlier run or another process wrote it."""
        if not self.file.exists() or not self.file.stat().st_size:
            return
        known = Shipped.read(self.file)
        offers = {offer.address: offer for offer in self.spot.offers}
        for source in known.sources:
            offer = offers.get(source.backend)
            if offer is not None and dict(offer.versions()) != dict(source.measured_with):
                had, here = _said(source.measured_with), _said(offer.versions())
                expected = f"a new file, or {source.backend} with {had}, which {self.file} is of"
                raise InvalidInput("--ship", got=f"{source.backend} with {here}", expected=expected)
            mine = self.sources.get(source.backend, source)
            passed = tuple(dict.fromkeys((*source.passed, *mine.passed)))
            self.sources[source.backend] = replace(mine, passed=passed)
        addresses = [source.backend for source in known.sources]
        for shape in known.shapes:
            _, times = self.shapes.setdefault(str(shape), (shape, {}))
            for step, all_us in shape.steps.items():
                timed = zip(addresses, all_us, strict=True)
                times.setdefault(step, {a: us for a, us in timed if us is not None})

    def todo(self) -> list[Task]:
        """The tasks of this process with the steps that have no figures yet."""
        found = []
        for task in islice(tasks(self.spot.platform), self.share[0], None, self.share[1]):
            _, times = self.shapes.get(_name(task), (None, {}))
            left = tuple(each for each in task.workloads if str(each) not in times)
            if left:
                found.append(replace(task, workloads=left))
        return found

    def run(self, minutes: float, jobs: int) -> Iterator[tuple[Task, Workload]]:
        """Measure what is left until the time is over, and yield each step once it is in the file.

        What has begun leaves a step at least, so that a short run leaves something.
        jobs: processes that compile before anything is timed; 0 for none.
        Raises BackendFailed for a backend that made the device unusable.
        """
        end, begun = time.monotonic() + 60 * minutes, False
        # The backends of a file passed their checks, whose kernels need not be compiled again
        ahead = replace(self.spot, check_seconds=0.0) if self.sources else self.spot
        for task in ahead.compiled(self.todo(), jobs, end):
            entrants = [each for each in self.spot.entrants(task.steps) if self._passes(each, task)]
            for workload in task.workloads:
                if begun and time.monotonic() > end:
                    return
                begun, rows = True, self.spot.rows(workload, entrants)
                self._add(task, workload, rows)
                self.write()
                self.spot.check_device(rows)
                yield task, workload

    def _passes(self, entrant: Entrant, task: Task) -> bool:
        """Whether the backend passes the suite in this phase of this kind of layers."""
        address = entrant.offer.address
        what = f"{task.phase} {task.request.kind} {task.request.kv_dtype}"
        source = self.sources.setdefault(address, self._source(entrant.offer))
        if what in source.passed:
            return True
        if (address, what) not in self.refused:
            check = check_conformance(entrant, self.spot.device, self.spot.check_seconds)
            if check.conformant:
                self.sources[address] = replace(source, passed=(*source.passed, what))
                return True
            self.refused[address, what] = check.failure
            self.notes.append(f"{address} is left out of {what}: {check.failure}")
        return False

    def _source(self, offer: Offer) -> Source:
        return Source(
            backend=offer.address,
            versions=_ranges(offer),
            measured_with=offer.versions(),
            build=offer.card.build(self.spot.platform),
        )

    def _add(self, task: Task, workload: Workload, rows: Sequence[Row]) -> None:
        empty: dict[str, dict[str, float]] = {}
        _, times = self.shapes.setdefault(
            _name(task), (Shape(request=task.request, steps={}), empty)
        )
        times[str(workload)] = {
            row.backend: round(row.median_us, 2) for row in rows if row.median_us is not None
        }
        self.notes += [
            f"{row.backend}, {row.workload}, {_name(task)}: {row.status}: {row.why}"
            for row in rows
            if row.status != "measured"
        ]

    def write(self) -> None:
        """Replace the file, a line for each step, with what other processes added since."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self.file.with_name(f".{self.file.name}.lock"), timeout=LOCK_SECONDS)
        with lock:
            self._take_over()
            with Files.replacing(self.file) as out:
                out.write(as_text(self._shipped()))
            self.file.chmod(0o644)

    def _shipped(self) -> Shipped:
        return Shipped(
            device=Device.of(self.spot.platform),
            date=datetime.now(timezone.utc).date().isoformat(),
            command=self.command,
            sources=tuple(self.sources.values()),
            shapes=tuple(
                replace(
                    shape,
                    steps={
                        step: tuple(us.get(address) for address in self.sources)
                        for step, us in times.items()
                    },
                )
                for shape, times in self.shapes.values()
            ),
        )


def as_text(shipped: Shipped) -> str:
    """The JSON of a file, with a line for each backend and each step, for diffs."""
    data = shipped.to_dict()
    shapes = []
    for shape in data.pop("shapes"):
        rows = shape["steps"].items()
        steps = ",\n".join(f"   {json.dumps(step)}: {json.dumps(us)}" for step, us in rows)
        shapes.append(f'  {{"request": {json.dumps(shape["request"])}, "steps": {{\n{steps}}}}}')
    sources = ",\n".join(f"  {json.dumps(each)}" for each in data.pop("sources"))
    head = "".join(f" {json.dumps(name)}: {json.dumps(value)},\n" for name, value in data.items())
    listed = ",\n".join(shapes)
    return f'{{\n{head} "sources": [\n{sources}],\n "shapes": [\n{listed}]\n}}\n'


def _name(task: Task) -> str:
    return str(Shape(request=task.request, steps={}))


def _ranges(offer: Offer) -> Mapping[str, str]:
    """The versions that figures hold for: all that the card admits, of the plugin from its own on.
    Other kernels of the same card are another build."""
    ranges = {name: f">={version}" for name, version in offer.versions().items()}
    for text in (text for texts in offer.card.requirements() for text in texts):
        needed = Requirement(text)
        if needed.name in ranges and needed.specifier:
            ranges[needed.name] = str(needed.specifier)
    return ranges


def _said(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())
