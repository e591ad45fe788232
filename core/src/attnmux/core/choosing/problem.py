"""The problem that the search solves: groups of phases, each served by one backend.

Verify and draft run on the backend of decode or extend, which leads their group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, NamedTuple

from attnmux.core.cards.card import Offer
from attnmux.core.cards.named import offers_named, refuse_unknown
from attnmux.core.choosing.checking import Ranking
from attnmux.core.facts.axes import AXES
from attnmux.core.facts.errors import UnknownBackend
from attnmux.core.facts.libraries import Libraries
from attnmux.core.facts.platform import Platform
from attnmux.core.facts.policy import Policy
from attnmux.core.facts.questions import Question, Questions
from attnmux.core.facts.request import Request
from attnmux.core.facts.verdicts import Coercion, Reason

FOLLOWERS = ("verify", "draft")
"""Phases of speculation: they run on the backend of extend or of decode."""

LEADS = ("decode", "extend", "encoder")
"""Leading phases; a better rank in an earlier one outweighs any in a later one."""

CACHED_LEADS = ("decode", "extend")
"""Leading phases whose backends share the KV cache."""

WEAK_ORIGINS = ("model", "platform", "default")
"""Origins of values that may be coerced without permission: no user insists on them."""

Opposed = Mapping[str, frozenset[str]]
"""For each address, the backends that cannot be paired with it across extend and decode. Backends
without such a rule are left out."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False, repr=False)
class Group:
    """Phases that one backend serves, and the offers that may."""

    lead: str
    phases: tuple[str, ...]
    offers: tuple[Offer, ...]
    named: str = ""
    """The backend's name as the asker gave it; empty for an automatic choice."""
    source: str = ""
    """Where the name comes from, unless from the user."""
    coercion: Coercion | None = None
    """Set if companions replace a named backend that does not serve the phase."""


class Variant(NamedTuple):
    """A request with its questions: as asked, with values unset or with the solver's values set."""

    request: Request
    questions: Questions
    dropped: tuple[str, ...] = ()
    """Fields of the asker's request that coercion left unset."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False, repr=False)
class Problem:
    """Everything that stays the same during the search."""

    request: Request
    platform: Platform
    policy: Policy
    offers: tuple[Offer, ...]
    groups: tuple[Group, ...]
    barred: Callable[[str], Sequence[Reason]]
    """The reasons that keep the offer with an address out of any request. It may look for
    libraries: it is called last, for offers whose clauses fit."""
    ranking: Ranking
    opposed: Opposed
    libraries: Libraries

    def opponents(self, address: str, lead: str) -> frozenset[str]:
        """Addresses of the backends that may not serve the other of decode and extend."""
        return self.opposed.get(address, frozenset()) if lead in CACHED_LEADS else frozenset()

    def serves(self, offer: Offer, questions: Questions, phases: Iterable[str]) -> bool:
        """Whether the offer serves all of `phases`."""
        served = all(offer.card.serves(questions[phase]) for phase in phases)
        return served and not self.barred(offer.address)

    def variants(self) -> tuple[Variant, ...]:
        """The request as it is, then with any one coercible value unset, any two, …"""
        coercible = [
            axis.name
            for axis in AXES
            if axis.droppable
            and getattr(self.request, axis.name)
            and (self.policy.allow_coercion or self.request.origins[axis.name] in WEAK_ORIGINS)
        ]
        variants = [self.variant(self.request)]
        for number in range(1, len(coercible) + 1):
            for dropped in combinations(coercible, number):
                unset: dict[str, Any] = dict.fromkeys(dropped)
                variants.append(self.variant(self.request.replace(**unset), dropped))
        return tuple(variants)

    def variant(
        self, request: Request, dropped: tuple[str, ...] = (), opened: Questions | None = None
    ) -> Variant:
        """The variant of a request; `opened`: the questions before the solver set open values."""
        questions = {
            phase: Question(
                request=request,
                platform=self.platform,
                phase=phase,
                demands=() if opened is None else opened[phase].demands,
            )
            for phase in request.phases
        }
        return Variant(request, questions, dropped)


def phases_by_lead(request: Request) -> Mapping[str, tuple[str, ...]]:
    """The requested phases that share a backend, by the leading phase, in the order of LEADS.

    A lead can be missing from its own phases: a request for verify alone is led by extend.
    """
    leader = request.verify_lead
    by_lead = {}
    for lead in LEADS:
        together = (lead, *FOLLOWERS) if lead == leader else (lead,)
        phases = tuple(phase for phase in request.phases if phase in together)
        if phases:
            by_lead[lead] = phases
    return by_lead


def opposed(offers: Sequence[Offer]) -> Opposed:
    """The offers that exclude each other: a rule on one card holds in both directions."""
    rivals: dict[str, set[str]] = {}
    for offer in offers:
        for other in offers if offer.card.excludes else ():
            if other is not offer and not other.names.isdisjoint(offer.card.excludes):
                rivals.setdefault(offer.address, set()).add(other.address)
                rivals.setdefault(other.address, set()).add(offer.address)
    return {address: frozenset(others) for address, others in rivals.items()}


def groups_of(
    request: Request, policy: Policy, offers: Sequence[Offer], libraries: Libraries
) -> tuple[Group, ...]:
    """The requested phases in groups, in the order of LEADS.

    Raises UnknownBackend or InvalidInput for a named backend that does not exist or is ambiguous.
    The user's names are checked even if no requested phase needs them, and so are the names
    that are allowed, denied or preferred.
    """
    if offers:
        refuse_unknown("allow", policy.allow or (), offers, libraries)
        refuse_unknown("deny", policy.deny, offers, libraries)
        refuse_unknown("prefer", policy.prefer, offers, libraries)
    for name in policy.said_by_user():
        offers_named(name, offers, libraries)
    return tuple(
        _as_named(Group(lead=lead, phases=phases, offers=tuple(offers)), policy, libraries)
        for lead, phases in phases_by_lead(request).items()
    )


def _as_named(group: Group, policy: Policy, libraries: Libraries) -> Group:
    """The group with the offers that the policy names for it; `group` has all offers."""
    naming = policy.named_for(group.lead)
    if naming is None:
        return group
    field, name = naming
    source = policy.source_of(field)
    try:
        meant = offers_named(name, group.offers, libraries)
    except UnknownBackend as error:  # never for the user's names, which were checked before
        hint = f"{error.hint} (named by {source})"
        raise UnknownBackend(name, known=error.known, hint=hint) from None
    companions = tuple(dict.fromkeys(word for offer in meant for word in offer.card.companions))
    declared = any(
        clause.phase.admits(group.lead) for offer in meant for clause in offer.card.clauses
    )
    if field != "backend" or not companions or declared:
        return replace(group, offers=meant, named=name, source=source)
    coercion = Coercion(
        field=f"backend for {group.lead}",
        old=name,
        new=" or ".join(companions),
        because=f"{name} does not serve {group.lead}; its card names the companion",
        origin=policy.origins.get(field, "user"),
    )
    offers = _companions(name, group, companions, libraries)
    return replace(group, offers=offers, named=name, source=source, coercion=coercion)


def _companions(
    name: str, group: Group, words: Sequence[str], libraries: Libraries
) -> tuple[Offer, ...]:
    """The installed companions; raises UnknownBackend if there are none."""
    companions: list[Offer] = []
    unknown: UnknownBackend | None = None
    for word in words:
        try:
            companions += offers_named(word, group.offers, libraries)
        except UnknownBackend as error:
            unknown = unknown or error
    if not companions and unknown is not None:
        hint = f"{name} does not serve {group.lead} and names it as its companion; {unknown.hint}"
        raise UnknownBackend(unknown.name, known=unknown.known, hint=hint) from unknown
    return tuple(companions)
