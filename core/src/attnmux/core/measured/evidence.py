"""The measurements that count for a choice: of this machine, else of a device of its kind."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from attnmux.core.cards.card import Offer
from attnmux.core.choosing.checking import standing
from attnmux.core.choosing.shortcomings import admits_any
from attnmux.core.facts.errors import InvalidInput
from attnmux.core.facts.libraries import Libraries, assumed, release
from attnmux.core.facts.platform import Platform
from attnmux.core.facts.policy import Policy
from attnmux.core.facts.questions import Question
from attnmux.core.facts.records import Device, latest
from attnmux.core.measured.measurement import Measurement, insisted
from attnmux.core.measured.shipped import (
    Shape,
    Shipped,
    batch_size_of,
    read_once,
)

Times = Mapping[str, float]
"""Medians in microseconds by workload."""

Current = Mapping[tuple[str, str], Mapping[str, Sequence[Measurement]]]
"""Measurements of this machine that count, by (phase, shape) and the backend's address."""

HERE = "measured on this machine"


class Timed(NamedTuple):
    """The times of the backends that serve a question."""

    times: Mapping[str, Times]
    """By address."""
    sizes: Mapping[str, int]
    """Requests of each of decode's workloads."""
    source: str
    """Source of the times: who measured, where, and if not here, on which shape."""


NOTHING = Timed({}, {}, "")


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """The figures that count for a platform and its offers."""

    offers: Mapping[str, Offer] = field(default_factory=dict)
    own: Current = field(default_factory=dict)
    shipped: Sequence[tuple[Shipped, Sequence[str | None], str]] = ()
    """Each file with the addresses whose figures hold here, and who carries it."""
    problems: tuple[str, ...] = ()
    """Files that cannot be read, in words."""

    def __bool__(self) -> bool:
        return bool(self.own or self.shipped or self.problems)

    def timed(self, question: Question) -> Timed:
        """This machine's times for exactly this shape if two backends have some, else those of the
        most similar shape in the first file that has one."""
        asked = insisted(question)

        def serving(times: Mapping[str, Times]) -> dict[str, Times]:
            return {
                address: timed
                for address, timed in times.items()
                if admits_any(self.offers[address].card.clauses, asked)
            }

        here = self.own.get((question.phase, Measurement.shape_of(question)), {})
        own = serving({a: {one.workload: one.median_us for one in here[a]} for a in here})
        if len(own) > 1:
            records = [one for address in own for one in here[address]]
            unsized = {one.workload for one in records if one.batch_size is None}
            sizes = {one.workload: one.batch_size or 0 for one in records}
            return Timed(own, {s: sizes[s] for s in sizes.keys() - unsized}, HERE)
        for shape, addresses, source in self._nearest(question):
            times = serving(shape.table(question.phase, addresses))
            if len(times) > 1:
                steps = {step for timed in times.values() for step in timed}
                sizes = {s: batch_size_of(s) for s in steps if question.phase == "decode"}
                return Timed(times, sizes, f"{source}: {shape}")
        return NOTHING

    def _nearest(self, question: Question) -> Iterable[tuple[Shape, Sequence[str | None], str]]:
        if not self.shipped:
            return
        from attnmux.core.measured.nearest import nearest  # noqa: PLC0415  # few files are shipped

        for shipped, addresses, source in self.shipped:
            if (shape := nearest(shipped.shapes, question)) is not None:
                yield shape, addresses, source


def evidence_of(
    measurements: Iterable[Measurement],
    platform: Platform,
    offers: Iterable[Offer],
    policy: Policy | None = None,
    *,
    libraries: Libraries | None = None,
) -> Evidence:
    """The figures that count on the platform.

    libraries: as `facts.libraries.assumed` takes them.

    A measurement of this machine counts with its device and its versions, unless a current one of
    the backend for the same phase and shape failed conformance. An offer's shipped figures count on
    a device of their kind, within their ranges of versions. Neither does for a backend that
    libraries or `policy` bar. On a platform elsewhere only shipped figures count.
    """
    policy, offers, device = policy or Policy(), tuple(offers), Device.of(platform)
    here = [each for each in measurements if platform.is_here and each.device == device]
    carried = {each: offer for offer in offers for each in offer.figures if each.hold_on(platform)}
    if not here and not carried:
        return Evidence()
    known = assumed(policy.without, libraries, platform.is_here)
    admitted = {each.address: each for each in offers if not standing(each, policy, known)}
    shipped: list[tuple[Shipped, Sequence[str | None], str]] = []
    problems = []
    for each, offer in carried.items():
        try:
            content = read_once(each.file)
        except InvalidInput as error:
            problems.append(f"figures of {offer.distribution} are left out: {error}")
            continue
        holding = content.counting(platform, admitted, known)
        who = release(offer.distribution or offer.plugin, offer.version)
        shipped.append((content, holding, f"measured on {content.device.name} by {who}"))
    return Evidence(
        offers={each.address: each for each in offers},
        own=_current(here, admitted, known),
        shipped=tuple(shipped),
        problems=tuple(problems),
    )


def _current(
    here: Sequence[Measurement], admitted: Mapping[str, Offer], libraries: Libraries
) -> Current:
    """The measurements of admitted backends with their installed versions, without those of a
    backend that failed conformance in the same phase and shape."""
    current: dict[tuple[str, str], dict[str, list[Measurement]]] = {}
    for address in sorted({each.backend for each in here} & admitted.keys()):
        versions = admitted[address].versions(libraries)
        own = (each for each in here if each.backend == address and each.versions == versions)
        for each in latest(own):
            found = current.setdefault((each.phase, each.shape), {})
            found.setdefault(address, []).append(each)
    return {
        asked: {
            address: timed
            for address, timed in found.items()
            if all(each.conformant for each in timed)
        }
        for asked, found in current.items()
    }
