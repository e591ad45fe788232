"""From the name that a user gave to the cards that it means."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from attnmux.core.choosing.common.checks import nearest
from attnmux.core.choosing.offer.card import Offer
from attnmux.core.choosing.offer.libraries import Libraries, installed_version
from attnmux.core.errors import InvalidInput, UnknownBackend

KNOWN = Path(__file__).with_name("known_backends.json")
"""Which distribution of this project brings which backend: what an error needs to name the pip
line for a plugin that is not installed. Read only then; choosing itself has no list of names."""


def means(name: str, offer: Offer) -> bool:
    """Whether `name` is the card's name, an alias of it, or either with its plugin in front."""
    plugin, slash, bare = name.rpartition("/")
    return (not slash or offer.plugin == plugin) and bare in (offer.card.name, *offer.card.aliases)


def offers_named(
    name: str, offers: Sequence[Offer], libraries: Libraries = installed_version
) -> tuple[Offer, ...]:
    """The cards that `name` means: by name, alias, or `plugin/name`.

    Several cards of one plugin can share an alias; then the one that fits is meant. A card's own
    name is never taken over by another plugin's alias.
    Raises UnknownBackend for a name that no plugin offers, InvalidInput for a bare name that two
    plugins use.
    """
    bare = name.rpartition("/")[2]
    meant = tuple(offer for offer in offers if means(name, offer))
    if not meant:
        raise unknown_backend(name, offers, libraries)
    by_name = [offer for offer in meant if offer.card.name == bare]
    owners = {offer.plugin for offer in by_name or meant}
    if len(owners) > 1:
        sharing = sorted(offer.address for offer in by_name or meant)
        expected = f"one of {', '.join(sharing)}, as several plugins offer it"
        raise InvalidInput("backend", came=repr(name), expected=expected)
    return tuple(offer for offer in meant if offer.plugin in owners)


def refuse_unknown(
    verb: str, names: Sequence[str], offers: Sequence[Offer], libraries: Libraries
) -> None:
    """Raise UnknownBackend for a name to allow, deny or prefer (`verb`) that means no backend.

    A typing error there would leave a backend in use that was to be kept out. A backend of
    this project whose plugin is not installed may be listed: one configuration can serve
    several machines.
    """
    for name in names:
        if any(means(name, offer) for offer in offers):
            continue
        if name.rpartition("/")[2] not in _sources():
            error = unknown_backend(name, offers, libraries)
            hint = f"{error.hint} (it stands among the backends to {verb})"
            raise UnknownBackend(name, known=error.known, hint=hint)


def _sources() -> Mapping[str, str]:
    sources: dict[str, str] = {}
    for distribution, backends in json.loads(KNOWN.read_text(encoding="utf-8")).items():
        sources.update(dict.fromkeys(backends, distribution))
    return sources


def unknown_backend(
    name: str, offers: Sequence[Offer], libraries: Libraries = installed_version
) -> UnknownBackend:
    """The error for a name that nobody offers, with the nearest name and how to get it."""
    sources = _sources()
    offered = sorted({word for o in offers for word in (o.card.name, o.address, *o.card.aliases)})
    bare = name.rpartition("/")[2]
    meant = bare if bare in sources else nearest(name, [*offered, *sources])
    parts = [f"did you mean {meant!r}?"] if meant and meant != name else []
    if meant in sources and meant not in offered:
        parts.append(_how_to_get(meant, sources[meant], libraries))
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
        "it, failed to load (`attnmux backends` says so), or is excluded by the configuration"
    )
