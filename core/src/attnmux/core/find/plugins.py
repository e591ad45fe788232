"""The installed plugins as data. Each is imported once, in another process, until it changes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from attnmux.core.cards.card import Offer
from attnmux.core.cards.named import KNOWN_BACKENDS
from attnmux.core.facts.checks import nearest
from attnmux.core.facts.errors import InvalidInput, PluginError
from attnmux.core.facts.libraries import canonical, distributions, entry_points
from attnmux.core.facts.policy import Policy
from attnmux.core.find.examine import (
    Entry,
    Plugin,
    PluginFailure,
    answers_of,
    failure_of,
)
from attnmux.core.find.store import Store
from attnmux.core.find.visibility import NO_VARIABLES

GROUP = "attnmux"
"""The entry-point group; an entry point's name is the plugin's, its value the plugin module."""
OWN = "attnmux-"
"""Where `attnmux-NAME` is installed, the plugin name NAME is its own."""
SECONDS = 10.0
"""For one plugin. A healthy one answers in milliseconds, a wedged driver never."""


@dataclass(frozen=True, slots=True)
class Plugins:
    """The plugins that work, and why the others do not."""

    loaded: tuple[Plugin, ...] = ()
    failures: tuple[PluginFailure, ...] = ()
    cache: Path | None = None
    """The folder that keeps answers; None: nothing is kept."""
    seconds: float = SECONDS
    policy: Policy = field(default_factory=Policy)
    """Which backends the configuration admits."""
    variables: Mapping[str, str] = NO_VARIABLES
    """The environment's variables that hide devices."""
    named: str | None = None
    """The configured platform, which may describe a device that no plugin finds."""

    def offers(self) -> tuple[Offer, ...]:
        """Every card with the plugin that brought it."""
        brought = [(plugin, card) for plugin in self.loaded for card in plugin.cards]
        owners = {name: {distribution} for name, distribution in KNOWN_BACKENDS.items()}
        for plugin, card in brought:
            if card.name not in KNOWN_BACKENDS:
                owners.setdefault(card.name, set()).add(plugin.distribution)
        offers = []
        for plugin, card in brought:
            names = (card.name, *card.aliases)
            foreign = {
                n for n in names if plugin.distribution not in owners.get(n, {plugin.distribution})
            }
            offer = Offer(
                card=card,
                plugin=plugin.name,
                distribution=plugin.distribution,
                version=plugin.entry.version,
                foreign=frozenset(foreign),
            )
            admitted = self.policy.admits(offer.names, offer.claims)
            offers.append(offer if admitted else replace(offer, admitted=False))
        return tuple(offers)


def several_names(argument: str, names: Iterable[str]) -> tuple[str, ...]:
    """`names`, read once. Raises InvalidInput for one text instead of several names."""
    if isinstance(names, str):
        raise InvalidInput(argument, got=repr(names), expected="several names, in a list")
    return tuple(names)


def is_admitted(distribution: str, allow: Iterable[str] | None, deny: Iterable[str]) -> bool:
    """Whether the lists admit a distribution. In them, NAME also means `attnmux-NAME`."""
    name = canonical(distribution)
    own = {name, name.removeprefix(OWN)}
    allowed = allow is None or not own.isdisjoint(map(canonical, allow))
    return allowed and own.isdisjoint(map(canonical, deny))


def find_entries(
    allow: Iterable[str] | None = None, deny: Iterable[str] = ()
) -> tuple[Sequence[Entry], Sequence[PluginFailure]]:
    """The installed plugins that are admitted, and those that cannot be used. Imports none.

    `allow` names distributions, and `deny` names distributions or plugins (see `is_admitted`). A
    plugin name that two distributions use is a failure, except of `attnmux-NAME`, to which NAME
    belongs. Raises InvalidInput for one text instead of several names.
    """
    allowed = None if allow is None else several_names("allow", allow)
    denied = several_names("deny", deny)
    points, unreadable = entry_points(GROUP)
    failures = [failure_of(name, name, "", "load", error) for name, error in unreadable]
    entries = [
        entry
        for entry in (Entry(point, *point.distribution.identity()) for point in points)
        if is_admitted(entry.distribution, allowed, denied)
        and is_admitted(entry.plugin, None, denied)
    ]
    entries.sort(key=lambda entry: entry.key)
    unique = []
    for entry in entries:
        sharing = sorted(e.distribution for e in entries if e.plugin == entry.plugin)
        owner = OWN + entry.plugin
        if len(sharing) == 1 or (entry.distribution == owner and sharing.count(owner) == 1):
            unique.append(entry)
            continue
        error = PluginError(
            f"the plugin name {entry.plugin!r} belongs to {' and '.join(sharing)}: "
            "deny one of the distributions (deny_plugins)"
        )
        failures.append(failure_of(entry.plugin, entry.distribution, entry.version, "load", error))
    return unique, failures


def unknown_plugins(names: Iterable[str]) -> dict[str, str]:
    """The names that admit no installed plugin, each with the name that was probably meant, or with
    an empty text."""
    points, _ = entry_points(GROUP)
    owners = {point.name: point.distribution.identity()[0] for point in points}
    return {
        name: owners.get(name) or nearest(name, sorted({*owners, *owners.values()}))
        for name in names
        if not any(is_admitted(owner, (name,), ()) for owner in owners.values())
    }


def read_plugins(
    allow: Iterable[str] | None = None,
    deny: Iterable[str] = (),
    *,
    cache: Path | None = None,
    seconds: float = SECONDS,
) -> Plugins:
    """The installed plugins with their cards.

    A plugin that is not in `cache`, or that changed since, is imported in another process, for at
    most `seconds`. One that raises, exits, crashes or hangs is a failure in the result, never an
    exception. Raises what `find_entries` raises.
    """
    entries, failures = find_entries(allow, deny)
    environment = _environment()
    store = Store.of(cache, "offers")
    kept = store.read()
    told = kept.get("plugins") if kept.get("environment") == environment else None
    rows: dict[str, Any] = told if isinstance(told, dict) else {}
    known = {entry.key: _kept(entry, rows[entry.key]) for entry in entries if entry.key in rows}
    answers, new = answers_of(entries, known, ("cards",), seconds)
    if fresh := {each.entry.key: row for each in new if (row := _row(each))}:
        store.write({"environment": environment, "plugins": {**rows, **fresh}})
    return Plugins(
        loaded=tuple(each for each in answers if not each.failures),
        failures=(*failures, *(failure for each in answers for failure in each.failures)),
        cache=cache,
        seconds=seconds,
    )


def _environment() -> str:
    """Changes with the interpreter, with core, and with every distribution that is installed: what
    a plugin imports may come from any of them."""
    core = Path(__file__).parents[1]
    parts = [sys.version, *(found.folder for found in distributions().values())]
    for room in ("facts", "cards", "find"):
        with os.scandir(core / room) as files:
            parts += sorted(f"{f.path} {_stamp(f.path)}" for f in files if f.name.endswith(".py"))
    return sha256("\n".join(parts).encode(errors="replace")).hexdigest()


def _stamp(path: str) -> list[int]:
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return []
    return [status.st_mtime_ns, status.st_size]


def _row(plugin: Plugin) -> dict[str, Any] | None:
    """What is kept of an answer; None where no later change of the plugin would show."""
    record = plugin.entry.point.distribution.record_hash()
    files = {name: _stamp(name) for name in plugin.files}
    if not record and not files:
        return None
    return {"record": record, "files": files, **plugin.to_data()}


def _kept(entry: Entry, row: dict[str, Any]) -> Plugin | None:
    """The answer that was kept, or None where the plugin changed or the row cannot be read."""
    try:
        if row["record"] != entry.point.distribution.record_hash():
            return None
        if any(_stamp(name) != stamp for name, stamp in row["files"].items()):
            return None
        return Plugin.of_data(entry, row)
    except Exception:  # it is damaged
        return None
