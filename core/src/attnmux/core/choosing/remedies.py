"""Whether a hint helps in the end: a change that helps one backend can rule another one out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import tee

from attnmux.core.cards.advisory import Advisory
from attnmux.core.cards.card import Offer
from attnmux.core.choosing.assignments import is_compatible
from attnmux.core.choosing.points import Candidate, Point, candidates_of, feasible_points
from attnmux.core.choosing.problem import CACHED_LEADS, Problem, Variant
from attnmux.core.choosing.shortcomings import changed, remedy
from attnmux.core.facts.request import parse_fields
from attnmux.core.facts.verdicts import Reason, without_hints

Changes = tuple[tuple[str, str], ...]
"""Fields of the request and their new values, as text."""

Addresses = Mapping[str, None]
"""Addresses of offers, in their order."""


class Remedies:
    """Checks the hints of one problem. The results for a change serve later backends too.

    A group is given by its place among the problem's groups.
    """

    def __init__(self, problem: Problem) -> None:
        self._original = problem
        self._addresses = [
            dict.fromkeys(offer.address for offer in group.offers) for group in problem.groups
        ]
        self._after = cache(self._changed)
        self._hold = cache(self._lead_on)
        self._ways = cache(self._ways_to)

    def checked(
        self, place: int, offer: Offer, short: Sequence[Reason], advised: Sequence[Reason] = ()
    ) -> list[Reason]:
        """The reasons that bar the offer from any request, `short`, its shortcomings in a phase of
        the group, and those of advisories there. They have hints where following them all leads to
        a decision in which the offer serves the group."""
        reasons = [*self._original.barred(offer.address), *short, *advised]
        if reasons and all(reason.hint for reason in reasons):
            # Each finding hints at one page size for all of them
            pages = [reason for reason in advised if "=" in reason.hint.partition(" ")[0]]
            short = [*short, *pages[:1]]
            changes = tuple(parse_fields(*(reason.hint for reason in short)).items())
            if self._hold(place, offer.address, changes):
                return reasons
        return without_hints(reasons)

    def _lead_on(self, place: int, address: str, changes: Changes) -> bool:
        """Whether the offer serves its group after the changes, with backends for the other groups;
        if necessary after more changes, of other fields."""
        problem, _, candidates, points = self._after(changes)
        allowed = [self._allowed(other, place, address) for other in range(len(candidates))]
        for other, (wanted, served) in enumerate(zip(allowed, candidates, strict=True)):
            if not any(offer.address in wanted for offer, _ in served):
                ways = self._ways(other, changes)
                helping = dict.fromkeys(ways[change] for change in wanted if change in ways)
                return any(
                    self._hold(place, address, changes + way)
                    for way in helping
                    if way and dict(changes).keys().isdisjoint(dict(way))
                )
        for _, fitting in tee(points)[1]:
            left = [
                [offer for offer in offers if offer.address in wanted]
                for offers, wanted in zip(fitting, allowed, strict=True)
            ]
            if all(left) and (not problem.opposed or is_compatible(problem, left)):
                return True
        return False

    def _allowed(self, other: int, place: int, address: str) -> Addresses:
        """The offers that may serve the group `other` if this one serves the group `place`."""
        if other == place:
            return {address: None}
        groups = self._original.groups
        barred = self._original.opponents(address, groups[place].lead)
        if not barred or groups[other].lead not in CACHED_LEADS:
            return self._addresses[other]
        return {rival: None for rival in self._addresses[other] if rival not in barred}

    def _ways_to(self, place: int, changes: Changes) -> Mapping[str, Changes]:
        """By address, the further changes after which an offer serves a phase of the group. An
        offer that no change of the original request helps is not tried after another change."""
        problem, variant, _, _ = self._after(changes)
        known = self._ways(place, ()) if changes else None
        ways = {}
        for offer in problem.offers:
            if (known is None or offer.address in known) and not problem.barred(offer.address):
                questions = [variant.questions[phase] for phase in problem.groups[place].phases]
                needed = [remedy(offer.card, question) for question in questions]
                if None not in needed:
                    ways[offer.address] = tuple(next(filter(None, needed), {}).items())
        return ways

    def _changed(
        self, changes: Changes
    ) -> tuple[Problem, Variant, list[list[Candidate]], Iterator[Point]]:
        """The problem after the changes, with every offer in every group; its candidates; its
        feasible points, to be copied: usually the first one is enough, others are found on demand.
        """
        original = self._original
        request = changed(original.request, changes) if changes else original.request
        # A request that drafts nothing any more verifies nothing; the lead of a group stays
        groups = tuple(
            replace(
                group,
                phases=tuple(phase for phase in group.phases if phase in request.phases),
                offers=original.offers,
            )
            for group in original.groups
        )
        problem = replace(
            original,
            request=request,
            groups=groups,
            barred=self._lasting,
            findings=self._lasting_findings,
        )
        variant = problem.variant(request)
        candidates = candidates_of(problem, variant)
        (points,) = tee(feasible_points(problem, variant, candidates), 1)
        return problem, variant, candidates, points

    def _lasting(self, address: str) -> Sequence[Reason]:
        """The reasons against an offer that installing a library does not remove."""
        reasons = self._original.barred(address)
        return () if all(reason.hint for reason in reasons) else reasons

    def _lasting_findings(self, address: str) -> Sequence[Advisory]:
        """The advisories on an offer's libraries that installing another release does not lift."""
        found = self._original.findings(address)
        if not found:
            return ()
        card = next(o.card for o in self._original.offers if o.address == address)
        return [each for each in found if not each.remedy(card.requirements(), found)]
