"""Names and options that a user gives, looked up in the cards."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from attnmux.core.cards.card import Offer, Option
from attnmux.core.facts.checks import nearest, read_flag
from attnmux.core.facts.errors import InvalidInput, UnknownBackend
from attnmux.core.facts.libraries import Libraries, installed_version
from attnmux.core.facts.values import OptionValue

KNOWN = Path(__file__).with_name("known_backends.json")
"""The backends of this project by distribution."""

KNOWN_BACKENDS: Mapping[str, str] = {
    backend: distribution
    for distribution, backends in json.loads(KNOWN.read_text(encoding="utf-8")).items()
    for backend in backends
}
"""The distribution of each backend of this project: the name belongs to it also if it is not
installed, and errors suggest its pip line."""


def offers_named(
    name: str, offers: Sequence[Offer], libraries: Libraries = installed_version
) -> tuple[Offer, ...]:
    """The cards with the name `name`, the alias `name`, or the address `plugin/name`.

    Several cards of one plugin can share an alias; the solver takes the one that fits. A card's own
    name wins over the alias of another plugin's card.
    Raises UnknownBackend for a name that no plugin offers, InvalidInput for a bare name that two
    plugins use.
    """
    bare = name.rpartition("/")[2]
    meant = tuple(offer for offer in offers if name in offer.names)
    if not meant:
        raise unknown_backend(name, offers, libraries)
    by_name = [offer for offer in meant if offer.card.name == bare]
    owners = {offer.plugin for offer in by_name or meant}
    if len(owners) > 1:
        sharing = sorted(offer.address for offer in by_name or meant)
        expected = f"one of {', '.join(sharing)}, as several plugins offer it"
        raise InvalidInput("backend", got=repr(name), expected=expected)
    return tuple(offer for offer in meant if offer.plugin in owners)


def refuse_unknown(
    verb: str, names: Sequence[str], offers: Sequence[Offer], libraries: Libraries
) -> None:
    """Raise UnknownBackend for a name to allow, deny or prefer (`verb`) that no backend has.

    A misspelt name would leave a denied backend in use. Backends of this project whose plugin is
    not installed are accepted: one configuration can serve several machines. Raise InvalidInput for
    a bare name to allow or prefer that two plugins use.
    """
    for name in names:
        if any(name in offer.names for offer in offers):
            if verb != "deny":
                offers_named(name, offers, libraries)
            continue
        if name.rpartition("/")[2] not in KNOWN_BACKENDS:
            error = unknown_backend(name, offers, libraries)
            hint = f"{error.hint} (among the backends to {verb})"
            raise UnknownBackend(name, known=error.known, hint=hint)


def unknown_backend(name: str, offers: Sequence[Offer], libraries: Libraries) -> UnknownBackend:
    """The error for a name that no plugin offers, with the nearest name and how to install it."""
    offered = sorted({word for o in offers for word in (o.card.name, o.address, *o.card.aliases)})
    bare = name.rpartition("/")[2]
    meant = bare if bare in KNOWN_BACKENDS else nearest(name, [*offered, *KNOWN_BACKENDS])
    parts = [f"did you mean {meant!r}?"] if meant and meant != name else []
    for offer in offers:
        if name in offer.claims:
            parts.append(f"{offer.distribution} offers another one, {offer.address}")
    if meant in KNOWN_BACKENDS and meant not in offered:
        parts.append(_how_to_get(meant, KNOWN_BACKENDS[meant], libraries))
    if not meant:
        names = sorted(
            {word for offer in offers for word in (offer.card.name, *offer.card.aliases)}
        )
        parts.append(f"the installed plugins offer {', '.join(names) or 'none'}")
    return UnknownBackend(name, known=offered, hint=" ".join(parts))


def _how_to_get(backend: str, distribution: str, libraries: Libraries) -> str:
    version = libraries(distribution)
    if version is None:
        return f"{backend} comes with {distribution}: pip install {distribution}"
    return (
        f"{backend} belongs to {distribution}, but the installed version {version} does not offer "
        "it, failed to load (see `attnmux backends`), or is excluded by the configuration"
    )


Given = Mapping[str, Mapping[str, OptionValue]]


def read_options(
    given: Given, offers: Sequence[Offer], libraries: Libraries = installed_version
) -> Mapping[str, Mapping[str, OptionValue]]:
    """The options that were given, by the address of each backend that they are for.

    Raises UnknownBackend for a name that no plugin offers, InvalidInput for an option that the
    backend does not have or a value that the option does not take.
    """
    options_by_address: dict[str, dict[str, OptionValue]] = {}
    for backend, values in given.items():
        meant = offers_named(backend, offers, libraries)
        for name, value in values.items():
            having = [
                (offer, option)
                for offer in meant
                for option in offer.card.options
                if option.name == name
            ]
            if not having:
                raise _no_such(backend, name, meant)
            for offer, option in having:
                read = _read(f"{backend}.{name}", value, option)
                options_by_address.setdefault(offer.address, {})[name] = read
    return options_by_address


def _no_such(backend: str, name: str, meant: Sequence[Offer]) -> InvalidInput:
    names = sorted({option.name for offer in meant for option in offer.card.options})
    near = nearest(name, names)
    expected = f"an option of {backend} ({', '.join(names) or 'it has none'})"
    guess = f"; did you mean {near!r}?" if near else ""
    return InvalidInput("option", got=repr(name), expected=expected + guess)


def _read(name: str, value: OptionValue, option: Option) -> OptionValue:
    refusal = InvalidInput(name, got=repr(value), expected=option.expected)
    try:
        read = _as_type(value, option.type)
    except ValueError:
        raise refusal from None
    if not option.admits(read):
        raise refusal
    return read


def _as_type(value: OptionValue, kind: type[OptionValue]) -> OptionValue:
    """Raises ValueError for another type: a float is not cut to an int, a number is not a bool."""
    if kind is bool:
        return read_flag("option", str(value))
    is_other = isinstance(value, bool) or not isinstance(value, (int, float, str))
    if is_other or (kind is int and isinstance(value, float)):
        raise ValueError(value)
    return kind(value)
