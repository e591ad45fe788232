"""Which phases one backend has to serve together, and which cards may serve them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from attnmux.core.choosing.ask.policy import Policy
from attnmux.core.choosing.ask.request import Request
from attnmux.core.choosing.common.verdict import Coercion
from attnmux.core.choosing.offer.card import Offer
from attnmux.core.choosing.offer.libraries import Libraries
from attnmux.core.choosing.offer.named import offers_named, refuse_unknown
from attnmux.core.errors import UnknownBackend

FOLLOWERS = ("verify", "draft")
"""Phases of speculation: they run on the backend of extend or of decode."""

ORDER = ("decode", "extend", "encoder")
"""Leading phases; a better rank in an earlier one outweighs any in a later one."""

CACHED_LEADS = ("decode", "extend")
"""Leading phases whose backends share the KV cache."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False, repr=False)
class Group:
    """Phases that one backend serves, and the offers that may."""

    lead: str
    phases: tuple[str, ...]
    offers: tuple[Offer, ...]
    named: str = ""
    """What the asker named; empty for an automatic choice."""
    source: str = ""
    """Where the name comes from, if not from the user."""
    coercion: Coercion | None = None
    """Set where a companion stands in for a named backend that does not serve the phase."""


def groups_of(
    request: Request, policy: Policy, offers: Sequence[Offer], libraries: Libraries
) -> tuple[Group, ...]:
    """The requested phases in groups, in the order of ORDER.

    Raises UnknownBackend or InvalidInput for a named backend that is not there or not one; a name
    that the user gave is looked at even where no requested phase needs it, and so are those that
    are allowed, denied or preferred.
    """
    if offers:
        for verb, names in policy.lists().items():
            refuse_unknown(verb, names, offers, libraries)
    for name in policy.said_by_user():
        offers_named(name, offers, libraries)
    leader = "decode" if request.speculative_attention_mode == "decode" else "extend"
    groups = []
    for lead in ORDER:
        together = {lead, *(FOLLOWERS if lead == leader else ())}
        phases = tuple(phase for phase in request.phases if phase in together)
        if phases:
            group = Group(lead=lead, phases=phases, offers=tuple(offers))
            groups.append(_as_named(group, policy, offers, libraries))
    return tuple(groups)


def _as_named(group: Group, policy: Policy, offers: Sequence[Offer], libraries: Libraries) -> Group:
    given = policy.named_for(group.lead)
    if given is None:
        return group
    field, name = given
    source = policy.source_of(field)
    try:
        meant = offers_named(name, offers, libraries)
    except UnknownBackend as error:
        # Names that the user gave were looked at before
        hint = f"{error.hint} (it is {source})"
        raise UnknownBackend(name, known=error.known, hint=hint) from None
    companions = tuple(dict.fromkeys(word for offer in meant for word in offer.card.companions))
    if field != "backend" or not companions or any(_declares(o, group.lead) for o in meant):
        return replace(group, offers=meant, named=name, source=source)
    instead = _companions(name, group.lead, companions, offers, libraries)
    coercion = Coercion(
        field=f"backend for {group.lead}",
        old=name,
        new=" or ".join(companions),
        because=f"{name} does not serve {group.lead}; its card names the companion",
        origin=policy.origins.get(field, "user"),
    )
    return replace(group, offers=instead, named=name, source=source, coercion=coercion)


def _companions(
    name: str, lead: str, words: Sequence[str], offers: Sequence[Offer], libraries: Libraries
) -> tuple[Offer, ...]:
    """Those of the companions that are installed; UnknownBackend where none is."""
    found: list[Offer] = []
    unknown: UnknownBackend | None = None
    for word in words:
        try:
            found += offers_named(word, offers, libraries)
        except UnknownBackend as error:
            unknown = unknown or error
    if not found and unknown is not None:
        hint = f"{name} does not serve {lead} and names it as its companion; {unknown.hint}"
        raise UnknownBackend(unknown.name, known=unknown.known, hint=hint) from unknown
    return tuple(found)


def _declares(offer: Offer, phase: str) -> bool:
    return any(clause.phase.admits(phase) for clause in offer.card.clauses)
