"""Verdicts on all candidates, and the error if nothing serves the request.

`judge` gives the reasons that concern one card in one phase. This module adds those that concern
other phases or other backends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache

from attnmux.core.cards.card import Offer
from attnmux.core.choosing.assignments import Assignment
from attnmux.core.choosing.checking import Rank, verdict
from attnmux.core.choosing.problem import CACHED_LEADS, Group, Problem, Variant
from attnmux.core.choosing.remedies import Remedies
from attnmux.core.choosing.shortcomings import (
    shortcomings,
    shortcomings_by_phase,
)
from attnmux.core.facts.errors import NoBackend
from attnmux.core.facts.questions import demands_of
from attnmux.core.facts.values import PHASES
from attnmux.core.facts.vendors import VENDORS
from attnmux.core.facts.verdicts import Obstacle, Reason, Verdict

Serving = Mapping[str, Sequence[Offer]]
"""By leading phase, the offers that serve its group."""


def verdicts(
    problem: Problem, variants: Sequence[Variant], best: Assignment | None
) -> tuple[Verdict, ...]:
    """One for each offer and phase, in an order that does not depend on the order of the cards."""
    all_verdicts = _Verdicts(problem, variants, best).all()

    def order(one: Verdict) -> tuple[int, bool, int, str, str]:
        return PHASES.index(one.phase), one.rank is None, one.rank or 0, one.backend, one.plugin

    return tuple(sorted(all_verdicts, key=order))


class _Verdicts:
    """The verdicts of one problem."""

    def __init__(
        self, problem: Problem, variants: Sequence[Variant], best: Assignment | None
    ) -> None:
        self._problem = problem
        self._variants = variants
        self._best = best
        self._plain = variants[0].questions
        self._serving = cache(self._served_by)
        self._winners: dict[str, Sequence[Offer]] = {}
        if best is not None:
            for group, winner in zip(problem.groups, best.winners, strict=True):
                self._winners[group.lead] = (winner,)
        # Each group can be served, but at no page size and KV dtype that all share
        self._conflict = best is None and all(self._serving(0).values())

    def all(self) -> list[Verdict]:
        remedies, phases = Remedies(self._problem), demands_of(self._plain.values())
        verdicts = []
        for offer in self._problem.offers:
            short = shortcomings_by_phase(offer.card, self._plain, phases)
            for place, group in enumerate(self._problem.groups):
                for phase in group.phases:
                    reasons = remedies.checked(place, offer, short[phase])
                    verdicts.append(self._verdict(group, phase, offer, reasons))
        return verdicts

    def _served_by(self, variant: int) -> Serving:
        questions = self._variants[variant].questions
        return {
            group.lead: [
                o for o in group.offers if self._problem.serves(o, questions, group.phases)
            ]
            for group in self._problem.groups
        }

    def _excluded(self, group: Group, offer: Offer, variant: int | None = 0) -> list[Reason]:
        """A reason if the offer excludes all that serve the other of decode and extend: in a
        variant, or, for None, as decided."""
        barred = self._problem.opponents(offer.address, group.lead)
        for other in CACHED_LEADS if barred else ():
            serving = self._winners if variant is None else self._serving(variant)
            others = serving.get(other, ()) if other != group.lead else ()
            if others and barred.issuperset(excluded.address for excluded in others):
                names = " or ".join(excluded.card.name for excluded in others)
                return [
                    Reason(
                        code="EXCLUDED",
                        axis="backend",
                        wanted=f"a backend for {group.lead} next to {names} for {other}",
                        offered=f"{offer.card.name}, which never shares a KV cache with {names}",
                    )
                ]
        return []

    def _verdict(self, group: Group, phase: str, offer: Offer, reasons: list[Reason]) -> Verdict:
        """`reasons` keep the offer from the phase alone; either all have a hint or none has."""
        problem = self._problem
        if not reasons:
            reasons = self._joint_reasons(group, offer)
            if not reasons and self._conflict and offer in group.offers:
                return verdict(offer, phase, [self._no_common_point(offer, group)], None)
        elif not reasons[0].hint:
            reasons = reasons + self._excluded(group, offer)
        best = self._best
        if not reasons:
            questions = self._plain
            if best is not None and problem.serves(offer, best.variant.questions, (phase,)):
                questions = best.variant.questions
            rank = problem.ranking(offer, questions[phase])
            return self._ranked(group, phase, offer, (), rank)
        for place, variant in enumerate(self._variants[1:], 1):
            served = problem.serves(offer, variant.questions, group.phases)
            if served and not self._excluded(group, offer, place):
                rank = problem.ranking(offer, variant.questions[phase])
                return self._ranked(group, phase, offer, reasons, rank)
        return verdict(offer, phase, reasons, None)

    def _ranked(
        self, group: Group, phase: str, offer: Offer, reasons: Sequence[Reason], rank: Rank
    ) -> Verdict:
        """The verdict on an offer that serves the phase, at the decided point or at another."""
        judged = verdict(offer, phase, reasons, rank)
        if self._best is None:
            return judged
        # What keeps it from serving as decided, with the winners of the others: its own phase's
        # reasons first, then those of the phases that one backend serves with it
        together, decided = (phase, *group.phases), self._best.variant.questions
        failing = next(
            (unserved for unserved in together if not offer.card.serves(decided[unserved])), ""
        )
        if failing:
            against = shortcomings(offer.card, decided[failing])
        else:
            against = self._excluded(group, offer, None)
        if not against:
            return replace(judged, eligible=True)
        return replace(judged, obstacle=Obstacle(phase=failing or phase, reasons=tuple(against)))

    def _joint_reasons(self, group: Group, offer: Offer) -> list[Reason]:
        """Why an offer that serves a phase alone cannot serve the group."""
        problem, plain = self._problem, self._plain
        served = [phase for phase in group.phases if problem.serves(offer, plain, (phase,))]
        if len(served) == len(group.phases):
            return self._excluded(group, offer)
        return [
            Reason(
                code="PHASES_TOGETHER",
                axis="phase",
                wanted=f"{', '.join(group.phases)} by one backend",
                offered=", ".join(served),
            )
        ]

    def _no_common_point(self, offer: Offer, group: Group) -> Reason:
        phases = ", ".join(phase for member in self._problem.groups for phase in member.phases)
        clauses = [clause for clause in offer.card.clauses if clause.phase.admits(group.lead)]
        pages = dict.fromkeys(str(clause.page_size) for clause in clauses)
        stored = dict.fromkeys(str(clause.kv_dtype) for clause in clauses)
        return Reason(
            code="NO_COMMON_POINT",
            axis="page_size",
            wanted=f"one page size and KV dtype for {phases}",
            offered=f"page size {' or '.join(pages)}, KV in {' or '.join(stored)}",
        )


def refusal(problem: Problem, candidates: Sequence[Verdict]) -> NoBackend:
    """The error: the phases that nothing serves, and each candidate's reasons there."""
    platform, groups = problem.platform, problem.groups
    where = platform.name or str(platform)
    if not candidates:
        line = f"pip install {VENDORS.get(platform.vendor, VENDORS['cpu']).distribution}"
        hint = f"{line}, unless it is installed but failed to load or is not allowed"
        return NoBackend(f"no attention backend for {where}: no plugin offers one ({hint})")
    failing = [group for group in groups if not _is_served(group, candidates)]
    named = sorted({group.named for group in failing if group.named})
    who = f"{' and '.join(named)} cannot serve" if named else "no attention backend serves"
    sources = dict.fromkeys(f"{g.named} is {g.source}" for g in failing if g.source)
    unserved = {phase for group in failing for phase in group.phases}
    phases = ", ".join(phase for phase in PHASES if phase in unserved)
    eligible = {key for group in failing for offer in group.offers for key in _keys(group, offer)}
    concerned = [v for v in candidates if v.reasons and (v.address, v.phase) in eligible]
    near, others = (concerned, []) if named else _set_apart(concerned)
    lines = [f"  {which}: {why}" for which, why in _grouped(near)]
    lines += [f"  for {what}: {', '.join(names)}" for what, names in others]
    encoder = any("encoder" in group.phases for group in failing)
    hints = [*sources, *(["multimodal=false asks for no encoder"] if encoder else ())]
    hint = f" ({'; '.join(hints)})" if hints else ""
    return NoBackend("\n".join([f"{who} {phases} on {where}{hint}", *lines]), candidates)


def _is_served(group: Group, candidates: Sequence[Verdict]) -> bool:
    """Whether one of the group's offers serves all its phases."""
    serving = {(v.address, v.phase) for v in candidates if v.verdict != "rejected"}
    return any(serving.issuperset(_keys(group, offer)) for offer in group.offers)


def _set_apart(concerned: Sequence[Verdict]) -> tuple[list[Verdict], list[tuple[str, list[str]]]]:
    """(verdicts worth reading, the others' purpose and names). Backends for another vendor or
    another kind of attention are set apart, unless no other is left."""
    near = list(concerned)
    others = []
    for axis, what in (("vendor", "other hardware"), ("kind", "other kinds of attention")):
        left = [
            verdict for verdict in near if all(reason.axis != axis for reason in verdict.reasons)
        ]
        names = sorted({verdict.backend for verdict in near} - {said.backend for said in left})
        if left and names:
            near = left
            others.append((what, names))
    return near, others


def _keys(group: Group, offer: Offer) -> list[tuple[str, str]]:
    return [(offer.address, phase) for phase in group.phases]


def effort(reasons: Sequence[Reason]) -> tuple[int, int]:
    """The reasons that no change removes, and all of them: the fewer, the nearer the backend."""
    return sum(not reason.hint for reason in reasons), len(reasons)


def _grouped(verdicts: Sequence[Verdict]) -> list[tuple[str, str]]:
    """(backend and its phases, reasons), the nearest backend first; one entry if a backend's
    phases share the reasons. Phases that the backend does not serve at all share one reason.
    """
    phases: dict[tuple[str, str, tuple[Reason, ...]], list[str]] = {}
    for outcome in sorted(verdicts, key=lambda one: (*effort(one.reasons), one.backend)):
        reasons = tuple(
            replace(reason, wanted="") if reason.code == "PHASE" else reason
            for reason in outcome.reasons
        )
        phases.setdefault((outcome.backend, outcome.plugin, reasons), []).append(outcome.phase)
    return [
        (
            f"{backend} ({plugin}) for {', '.join(served)}",
            "; ".join(
                str(reason if reason.wanted else replace(reason, wanted=", ".join(served)))
                for reason in reasons
            ),
        )
        for (backend, plugin, reasons), served in phases.items()
    ]
