"""Whether a hint helps in the end: a change that helps one backend can rule another one out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from attnmux.core.choosing.ask.request import parse_fields
from attnmux.core.choosing.common.verdict import Reason, without_hints
from attnmux.core.choosing.judge.shortcomings import changed, remedy
from attnmux.core.choosing.offer.card import Offer
from attnmux.core.choosing.search.assignments import is_compatible
from attnmux.core.choosing.search.points import Candidate, Point, candidates_of, feasible_points
from attnmux.core.choosing.search.problem import CACHED_LEADS, Group, Problem, Variant

Changes = tuple[tuple[str, str], ...]
"""Fields of the request and their new values, as text."""

Addresses = Mapping[str, None]
"""Of offers, in their order."""


class _Changed(NamedTuple):
    """The problem after some changes of its request."""

    problem: Problem
    """Every offer is in every group."""
    variant: Variant
    candidates: list[list[Candidate]]
    found: list[Point]
    rest: Iterator[Point]
    """Feasible points: those found so far, and the others."""

    def points(self) -> Iterator[Point]:
        """Usually the first one is enough: the others are only found on demand."""
        yield from self.found
        for point in self.rest:
            self.found.append(point)
            yield point


class Remedies:
    """Checks the hints of one problem. What is found for a change serves later backends too."""

    def __init__(self, problem: Problem) -> None:
        self._original = problem
        self._groups = {group.lead: group for group in problem.groups}
        self._addresses = {
            group.lead: dict.fromkeys(offer.address for offer in group.offers)
            for group in problem.groups
        }
        self._after: dict[Changes, _Changed] = {}
        self._held: dict[tuple[str, str, Changes], bool] = {}
        self._ways: dict[tuple[str, Changes], Mapping[str, Changes]] = {}

    def checked(self, group: Group, offer: Offer, short: Sequence[Reason]) -> list[Reason]:
        """The reasons that bar the offer from any request, and `short`, its shortcomings in a phase
        of the group. They have hints where following them all leads to a decision in which the
        offer serves the group."""
        reasons = [*self._original.barred(offer), *short]
        if not reasons:
            return []
        if not all(reason.hint for reason in reasons):
            return without_hints(reasons)
        changes = tuple(parse_fields(",".join(reason.hint for reason in short)).items())
        return reasons if self._hold(group.lead, offer, changes) else without_hints(reasons)

    def _hold(self, lead: str, offer: Offer, changes: Changes) -> bool:
        key = lead, offer.address, changes
        if key not in self._held:
            self._held[key] = self._lead_on(lead, offer, changes)
        return self._held[key]

    def _lead_on(self, lead: str, offer: Offer, changes: Changes) -> bool:
        """Whether the offer serves its group after the changes, with backends for the other groups;
        if necessary after more changes, of other fields."""
        after = self._changed(changes)
        allowed = [self._allowed(group, lead, offer) for group in after.problem.groups]
        for group, wanted, served in zip(
            after.problem.groups, allowed, after.candidates, strict=True
        ):
            if not any(one.address in wanted for one, _ in served):
                ways = self._ways_to(group, changes)
                helping = dict.fromkeys(ways[address] for address in wanted if address in ways)
                return any(
                    self._hold(lead, offer, changes + way)
                    for way in helping
                    if way and dict(changes).keys().isdisjoint(dict(way))
                )
        return any(_is_served(after.problem, point.fitting, allowed) for point in after.points())

    def _allowed(self, group: Group, lead: str, offer: Offer) -> Addresses:
        """The offers that may serve a group where `offer` serves that of `lead`."""
        if group.lead == lead:
            return {offer.address: None}
        opponents = self._original.opponents(offer, lead) if group.lead in CACHED_LEADS else ()
        addresses = self._addresses[group.lead]
        return {one: None for one in addresses if one not in opponents} if opponents else addresses

    def _ways_to(self, group: Group, changes: Changes) -> Mapping[str, Changes]:
        """By address, the further changes after which an offer serves a phase of the group. An
        offer that no change of the original request helps is not tried after another change."""
        key = group.lead, changes
        if key not in self._ways:
            after = self._changed(changes)
            known = self._ways_to(self._groups[group.lead], ()) if changes else None
            found = {}
            for offer in after.problem.offers:
                if (known is None or offer.address in known) and not after.problem.barred(offer):
                    questions = [after.variant.questions[phase] for phase in group.phases]
                    needed = [remedy(offer.card, question) for question in questions]
                    if None not in needed:
                        found[offer.address] = tuple(next(filter(None, needed), {}).items())
            self._ways[key] = found
        return self._ways[key]

    def _changed(self, changes: Changes) -> _Changed:
        if changes not in self._after:
            original = self._original
            request = changed(original.request, changes) if changes else original.request

            def barred(offer: Offer) -> Sequence[Reason]:
                """Reasons that installing a library does not remove."""
                reasons = original.barred(offer)
                return () if all(reason.hint for reason in reasons) else reasons

            # A request that drafts nothing any more verifies nothing; the lead of a group stays
            groups = tuple(
                replace(
                    group,
                    phases=tuple(phase for phase in group.phases if phase in request.phases),
                    offers=original.offers,
                )
                for group in original.groups
            )
            problem = replace(original, request=request, groups=groups, barred=barred)
            variant = problem.variant()
            candidates = candidates_of(problem, variant)
            rest = feasible_points(problem, variant, candidates)
            self._after[changes] = _Changed(problem, variant, candidates, [], rest)
        return self._after[changes]


def _is_served(
    problem: Problem, fitting: Sequence[Sequence[Offer]], allowed: Sequence[Addresses]
) -> bool:
    """Whether allowed offers serve all groups at a point, without two that exclude each other."""
    left = [
        [offer for offer in offers if offer.address in wanted]
        for offers, wanted in zip(fitting, allowed, strict=True)
    ]
    return all(left) and (not problem.opposed or is_compatible(problem, left))
