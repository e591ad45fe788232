"""The rows of the support matrix: one for each backend and kind of attention.

A cell is read from the clauses that serve the kind. Where only some of them serve a feature, it
names their difference from the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from attnmux.core import Offer, Platform, Request
from attnmux.core.plugin import ANY, Clause, Condition
from attnmux.core.verbs import (
    AXES,
    Axis,
    Proven,
    Question,
)
from attnmux.testing.matrix.clauses import covers, either, restrictions, union, union_said
from attnmux.testing.sampling.points import Value

Served = Literal["yes", "some", "no"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """A feature: served if a clause admits one of the values on the axis."""

    title: str
    axis: Axis
    values: tuple[Value, ...]
    """Any of them shows the feature; if only some are admitted, the cell lists them."""

    def request(self) -> Request:
        """One that asks for the feature."""
        if self.axis.asked_by:
            return Request.parse(self.axis.asked_by)
        return Request(**{self.axis.name: self.values[0]})  # type: ignore[arg-type]  # read by its field's reader


COLUMNS = tuple(
    Column(title=title, axis=axis, values=values)
    for axis in AXES
    for title, values in axis.columns.items()
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """Whether a feature is served; `where` names the part that is, if not all."""

    served: Served
    where: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A backend in one kind of attention."""

    kind: str
    backend: str
    plugin: str
    distribution: str
    machines: tuple[str, ...]
    phases: tuple[str, ...]
    page_sizes: str
    proven: Proven
    """By its runs, for the device that is asked for, or else those that it serves the kind on."""
    cells: tuple[Cell, ...]
    """In the order of COLUMNS."""
    excludes: tuple[str, ...]
    """Backends that must not share a KV cache with this one."""
    companions: tuple[str, ...]
    """Backends, any of which serves the phase that this one does not when it is named alone."""
    sources: Mapping[str, str]
    """See `BackendCard.sources`."""

    def features(self) -> Iterator[tuple[Column, Cell]]:
        """Each column with its cell."""
        return zip(COLUMNS, self.cells, strict=True)

    def to_dict(self) -> dict[str, Any]:
        return {
            **{name: getattr(self, name) for name in ("kind", "backend", "plugin", "distribution")},
            "machines": list(self.machines),
            "phases": list(self.phases),
            "page_sizes": self.page_sizes,
            "proof": self.proven.word,
            "verified_on": [{"proof": word, **run.to_dict()} for word, run in self.proven.runs],
            "features": {column.title: asdict(cell) for column, cell in self.features()},
            "excludes": list(self.excludes),
            "companions": list(self.companions),
            "sources": dict(self.sources),
        }


def narrowed(
    offers: Iterable[Offer], request: Request | None = None, platform: Platform | None = None
) -> list[Offer]:
    """The offers, each with only the clauses that admit a request or a machine, if it has any.

    A clause counts for a request if it admits one of the request's phases. No solver runs: values
    that the request leaves open demand nothing.
    """
    asked = request or Request()
    machine = platform or Platform(vendor="any", device_type="any", arch="any", is_here=False)
    questions = [Question(request=asked, platform=machine, phase=phase) for phase in asked.phases]

    def counts(axis: Axis) -> bool:
        of_machine = axis.of_platform and axis.name not in ("kind", "phase")
        return (platform if of_machine else request) is not None

    demanded = [[demand for demand in q.demands if counts(demand[0])] for q in questions]

    def admits(clause: Clause) -> bool:
        return any(clause.meets(demands) for demands in demanded)

    kept = [(offer, tuple(filter(admits, offer.card.clauses))) for offer in offers]
    return [
        replace(offer, card=replace(offer.card, clauses=clauses))
        for offer, clauses in kept
        if clauses
    ]


def rows_of(offers: Iterable[Offer], device: Platform | None = None) -> tuple[Row, ...]:
    """By kind, then by name. device: the one that the proof is for; None: all that a row serves."""
    ordered = sorted(offers, key=lambda offer: (offer.card.name, offer.plugin))
    found = []
    for kind in Request.KINDS:
        serving = [offer for offer in ordered if _clauses(kind, offer)]
        for offer in serving:
            names = (o.card.name for o in serving if o.excludes(offer) or offer.excludes(o))
            row = _row(kind, offer, tuple(names), device)
            found += [] if row is None else [row]
    return tuple(found)


def _clauses(kind: str, offer: Offer) -> list[Clause]:
    return [clause for clause in offer.card.clauses if clause.kind.admits(kind)]


def _row(kind: str, offer: Offer, excludes: tuple[str, ...], device: Platform | None) -> Row | None:
    """None where the backend serves no phase of the kind."""
    clauses = _clauses(kind, offer)
    phases = [phase for phase in Request.PHASES if phase != "encoder" or kind == "mha"]
    served = [phase for phase in phases if any(clause.phase.admits(phase) for clause in clauses)]
    if not served:
        return None
    runs = offer.card.verified_on
    return Row(
        kind=kind,
        backend=offer.card.name,
        plugin=offer.plugin,
        distribution=offer.distribution,
        machines=_machines(clauses),
        phases=tuple(served),
        page_sizes=union_said(union("page_size", clauses)),
        proven=Proven.on(runs, device, (), kind) if device else Proven.of(runs, clauses, kind),
        cells=tuple(_cell(column, clauses, phases) for column in COLUMNS),
        excludes=excludes,
        companions=() if {"extend", "decode"}.issubset(served) else offer.card.companions,
        sources=offer.card.sources,
    )


def _machines(clauses: Sequence[Clause]) -> tuple[str, ...]:
    """Each vendor with every limit that its clauses set, their versions together."""
    alike: dict[tuple[Condition, ...], list[Clause]] = {}
    for clause in clauses:
        key = (clause.vendor, clause.arch, clause.features, clause.runtime)
        alike.setdefault(key, []).append(clause)
    found = []
    for (vendor, arch, features, runtime), sharing in alike.items():
        words = [str(vendor)] + [str(arch)] * (arch is not ANY)
        versions = union("version", sharing)
        words += [f"version {union_said(versions)}"] * (ANY not in versions)
        words += [f"with {features}"] * (features is not ANY)
        words += [f"on {runtime}"] * (runtime is not ANY)
        found.append(" ".join(words))
    return tuple(dict.fromkeys(found))


def _cell(column: Column, clauses: Sequence[Clause], phases: Sequence[str]) -> Cell:
    """Only clauses of phases that can ask for the feature count."""
    axis = column.axis
    if axis.name == "phase":
        served = set(phases) >= set(column.values) and any(
            clause.phase.admits(value) for clause in clauses for value in column.values
        )
        return Cell(served="yes" if served else "no")
    asking = _phases_asking(axis, column.request(), phases)
    asked = [clause for clause in clauses if any(map(clause.phase.admits, asking))]
    admitted = {value for clause in asked for value in _admitted(axis, clause, column)}
    if not admitted:
        return Cell(served="no")
    having = [clause for clause in asked if admitted == set(_admitted(axis, clause, column))]
    lacking = [
        clause
        for clause in asked
        if clause not in having and not any(covers(other, clause, axis.name) for other in having)
    ]
    limits = _values_said(axis, column, asked)
    if lacking:
        apart = restrictions(axis.name, having, having + lacking) if having else []
        limits += apart or [either(axis.name, having, lacking)]
    if any(_admitted(axis, clause, column) for clause in lacking):
        limits.append("elsewhere in part")
    return Cell(served="some" if limits else "yes", where=", ".join(limits))


def _phases_asking(axis: Axis, request: Request, phases: Sequence[str]) -> list[str]:
    platform = Platform(vendor="any", device_type="any", arch="any")
    questions = {
        phase: Question(request=request, platform=platform, phase=phase) for phase in phases
    }
    return [phase for phase in phases if axis.wanted(questions[phase]) is not None]


def _admitted(axis: Axis, clause: Clause, column: Column) -> tuple[Value, ...]:
    condition = axis.condition(clause)
    return tuple(value for value in column.values if condition.admits(value))


def _values_said(axis: Axis, column: Column, asked: Sequence[Clause]) -> list[str]:
    """The admitted values, unless all values of the feature are."""
    admitted = {value for clause in asked for value in _admitted(axis, clause, column)}
    if admitted.issuperset(column.values):
        return []
    if all(isinstance(value, str) for value in column.values):
        return [" or ".join(str(value) for value in column.values if value in admitted)]
    serving = [clause for clause in asked if _admitted(axis, clause, column)]
    return [union_said(union(axis.name, serving))]
