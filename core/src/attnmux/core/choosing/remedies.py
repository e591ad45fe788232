"""Whether hints hold for the whole question: a change that helps one backend can cost another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from attnmux.core.choosing.ask.request import parse_fields
from attnmux.core.choosing.common.verdict import Reason, without_hints
from attnmux.core.choosing.judge.shortcomings import changed, remedy
from attnmux.core.choosing.offer.card import Offer
from attnmux.core.choosing.search.assignments import is_compatible
from attnmux.core.choosing.search.points import Candidate, Opening, candidates_of, feasible_points
from attnmux.core.choosing.search.problem import CACHED_LEADS, Group, Problem, Variant

Changes = tuple[tuple[str, str], ...]
"""Fields of the request and their new values, as text."""

Addresses = Mapping[str, None]
"""Of offers, in their order."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class _Changed:
    """The problem after some changes of its request."""

    problem: Problem
    """Every offer is in every group."""
    variant: Variant
    candidates: list[list[Candidate]]
    """For each group, the offers that serve it."""
    found: list[Opening]
    rest: Iterator[Opening]
    """Where all groups are served, as far as it was looked for, and the others."""

    def openings(self) -> Iterator[Opening]:
        """Mostly the first will do: the others are not worked out before somebody needs them."""
        yield from self.found
        for opening in self.rest:
            self.found.append(opening)
            yield opening


class Remedies:
    """The hints of one problem. What was found for a change is kept for the next backend."""

    def __init__(self, problem: Problem) -> None:
        self._original = problem
        self._addresses = {
            group.lead: dict.fromkeys(offer.address for offer in group.offers)
            for group in problem.groups
        }
        self._after: dict[Changes, _Changed] = {}
        self._held: dict[tuple[str, str, Changes], bool] = {}
        self._ways: dict[tuple[str, Changes], Mapping[str, Changes]] = {}

    def told(self, group: Group, offer: Offer, short: Sequence[Reason]) -> list[Reason]:
        """The reasons that keep an offer from a phase of the group: those that bar it whatever is
        asked, and `short` of what is; without hints where following them all would not lead to a
        decision in which the offer serves the group."""
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
            self._held[key] = self._leads_on(lead, offer, changes)
        return self._held[key]

    def _leads_on(self, lead: str, offer: Offer, changes: Changes) -> bool:
        """Whether the offer serves the group after the changes, beside backends for the others; if
        need be after more changes, of fields that were not changed yet."""
        after = self._changed(changes)
        allowed = [self._wanted(group, lead, offer) for group in after.problem.groups]
        for group, wanted, served in zip(
            after.problem.groups, allowed, after.candidates, strict=True
        ):
            if not any(one.offer.address in wanted for one in served):
                ways = self._ways_to(group, changes)
                helping = dict.fromkeys(ways[address] for address in wanted if address in ways)
                return any(self._further(lead, offer, changes, way) for way in helping if way)
        return any(
            _is_open(after.problem, opening.fitting, allowed) for opening in after.openings()
        )

    def _wanted(self, group: Group, lead: str, offer: Offer) -> Addresses:
        """The offers that may serve a group where `offer` serves that of `lead`."""
        if group.lead == lead:
            return {offer.address: None}
        apart = self._original.opponents(offer, lead) if group.lead in CACHED_LEADS else ()
        addresses = self._addresses[group.lead]
        return {one: None for one in addresses if one not in apart} if apart else addresses

    def _group(self, lead: str) -> Group:
        return next(group for group in self._original.groups if group.lead == lead)

    def _ways_to(self, group: Group, changes: Changes) -> Mapping[str, Changes]:
        """By address, what more to change so that an offer serves a phase of the group that it does
        not. Where no change of the plain request is enough, none is looked for after another."""
        key = group.lead, changes
        if key not in self._ways:
            after = self._changed(changes)
            known = self._ways_to(self._group(group.lead), ()) if changes else None
            found = {}
            for offer in after.problem.offers:
                if (known is None or offer.address in known) and not after.problem.barred(offer):
                    questions = [after.variant.questions[phase] for phase in group.phases]
                    needed = [remedy(offer.card, question) for question in questions]
                    if None not in needed:
                        found[offer.address] = tuple(next(filter(None, needed), {}).items())
            self._ways[key] = found
        return self._ways[key]

    def _further(self, lead: str, offer: Offer, changes: Changes, way: Changes) -> bool:
        again = dict(changes).keys() & dict(way).keys()
        return not again and self._hold(lead, offer, changes + way)

    def _changed(self, changes: Changes) -> _Changed:
        if changes not in self._after:
            original = self._original
            request = changed(original.request, changes) if changes else original.request

            def barred(offer: Offer) -> Sequence[Reason]:
                """A library that can be installed is no obstacle."""
                reasons = original.barred(offer)
                return () if all(reason.hint for reason in reasons) else reasons

            # Where nothing is drafted any more, nothing is verified; what leads a group stays
            groups = tuple(
                replace(
                    group,
                    phases=tuple(phase for phase in group.phases if phase in request.phases),
                    offers=original.offers,
                )
                for group in original.groups
            )
            problem = replace(original, request=request, groups=groups, barred=barred)
            variant = problem.plain()
            candidates = eligible(problem, variant.questions)
            rest = openings(problem, variant, candidates)
            self._after[changes] = _Changed(problem, variant, candidates, [], rest)
        return self._after[changes]


def _is_open(
    problem: Problem, fitting: Sequence[Sequence[Offer]], allowed: Sequence[Addresses]
) -> bool:
    """Whether those that are allowed serve all groups here, without two that exclude each other."""
    left = [
        [offer for offer in offers if offer.address in wanted]
        for offers, wanted in zip(fitting, allowed, strict=True)
    ]
    return all(left) and (not problem.opposed or is_compatible(problem, left))
