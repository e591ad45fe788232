"""Accuracy by measurements of this machine: what a request refuses, and what a decision notes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from attnmux.core.cards.card import Offer
from attnmux.core.choosing.checking import (
    Accuracy,
    by_card,
    too_large,
    unbounded,
)
from attnmux.core.choosing.decision import Decision
from attnmux.core.facts.platform import Platform
from attnmux.core.facts.questions import Question
from attnmux.core.facts.request import Request
from attnmux.core.facts.verdicts import Reason
from attnmux.core.measured.evidence import Current
from attnmux.core.measured.measurement import Measurement

FACTOR = 3
"""A backend whose rms error is more than this many times the smallest one for the same workload
counts as inaccurate. Kernels that differ only in the order of their sums stay within 1.5."""

TIMED = ("decode", "extend")
"""Phases that are measured."""


def by_measurement(found: Current, platform: Platform) -> Accuracy:
    """The accuracy that was measured; by the card for phases that were not measured."""
    if not any(measured for timed in found.values() for measured in timed.values()):
        return by_card

    def accuracy(offer: Offer, request: Request) -> list[Reason]:
        reasons: list[Reason] = []
        most = request.max_error
        if most is None:
            return reasons
        for phase in TIMED:
            if phase not in request.phases:
                continue
            timed = _timed(found, request, platform, phase)
            own = [each for each in timed.get(offer.address, ()) if each.worst_error is not None]
            worst = max(own, key=lambda each: each.worst_error or 0, default=None)
            if worst is None:
                reasons += unbounded(offer.card, request, most)
            elif (worst.worst_error or 0) > most:
                where = f"{worst.worst_error:.3g} measured for {worst.workload}"
                reasons.append(too_large(most, where))
        return list(dict.fromkeys(reasons))

    return accuracy


def notes_on(decision: Decision, found: Current) -> Iterator[str]:
    """A line for each choice whose error is more than `FACTOR` times the smallest one of those that
    could serve the phase."""
    for phase, choice in decision.choices:
        if phase not in TIMED:
            continue
        timed = _timed(found, decision.request, decision.platform, phase)
        if not _compared(choice.address, timed, timed.keys()):
            continue
        # Only now: a decision makes its candidates when they are first read
        eligible = {v.address for v in decision.candidates if v.phase == phase and v.eligible}
        if said := _compared(choice.address, timed, eligible | {choice.address}):
            yield f"{choice.address} for {phase}: {said}; max_error bounds it"


def _compared(
    address: str, timed: Mapping[str, Iterable[Measurement]], rivals: Collection[str]
) -> str:
    """The workload in which the error is most times the smallest one; empty up to FACTOR."""
    smallest: dict[str, tuple[float, str]] = {}
    for rival in sorted(timed.keys() & set(rivals)):
        for each in timed[rival]:
            if each.rms_error is not None:
                known = smallest.get(each.workload, (each.rms_error, rival))
                smallest[each.workload] = min(known, (each.rms_error, rival))
    above = [
        (each.rms_error / max(smallest[each.workload][0], 1e-9), each)
        for each in timed.get(address, ())
        if each.rms_error is not None and each.workload in smallest
    ]
    times, most = max(above, key=lambda pair: pair[0], default=(0.0, None))
    if most is None or times <= FACTOR:
        return ""
    error, best = smallest[most.workload]
    return (
        f"an error of {most.rms_error:.3g} roundings for {most.workload}, "
        f"{times:.3g} times the {error:.3g} of {best}"
    )


def _timed(
    found: Current, request: Request, platform: Platform, phase: str
) -> Mapping[str, Sequence[Measurement]]:
    question = Question(request=request, platform=platform, phase=phase)
    return found.get((phase, Measurement.shape_of(question)), {})
