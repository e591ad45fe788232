"""The installed plugins that the environment and the configuration file admit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from attnmux.core.facts.errors import PluginError, SettingsError
from attnmux.core.facts.libraries import EntryPoint, entry_points
from attnmux.core.facts.policy import Policy
from attnmux.core.find.examine import failure_of
from attnmux.core.find.plugins import (
    Plugins,
    find_entries,
    is_admitted,
    read_plugins,
    several_names,
)
from attnmux.core.find.settings import Settings, device_variables


def load_plugins(
    allow: Iterable[str] | None = None,
    deny: Iterable[str] = (),
    *,
    settings: Settings | None = None,
) -> Plugins:
    """The installed plugins with their cards. No plugin is imported into this process.

    `allow` (None: all) and `deny` name distributions. The lists of `settings` (default: the
    environment's and the configuration file's) hold as well, and so do its lists of backends: the
    offers that they leave out never win. A plugin that raises, exits, crashes, hangs, or shares its
    name with another is a failure in the result, never an exception.

    With a lock in the settings, a plugin or library that differs from it is a failure too.

    Raises InvalidInput for one text instead of several names, SettingsError for settings or a lock
    that cannot be read, and where core itself is not as locked.
    """
    settings = settings or Settings.load()
    allow = None if allow is None else several_names("allow", allow)
    configured, denied = settings.plugin_filter()
    if configured is not None:
        known = configured if allow is None else allow
        allow = tuple(name for name in known if is_admitted(name, configured, ()))
    deny = (*several_names("deny", deny), *denied)
    if settings.locked is None:
        plugins = _read(settings, allow, deny)
    else:
        plugins = _read_locked(settings, allow, deny)
    return replace(
        plugins,
        policy=Policy(allow=settings.allow_backends, deny=settings.deny_backends),
        variables=device_variables(),
        named=settings.platform,
    )


def admitted_points(group: str, name: str) -> dict[str, EntryPoint]:
    """The group's entry points of that name, by distribution, of plugins that the configuration
    admits."""
    points = [point for point in entry_points(group)[0] if point.name == name]
    if not points:
        return {}
    admitted = {plugin.distribution for plugin in load_plugins().loaded}
    found = {point.distribution.identity()[0]: point for point in points}
    return {owner: point for owner, point in sorted(found.items()) if owner in admitted}


def _read(settings: Settings, allow: Iterable[str] | None, deny: Iterable[str]) -> Plugins:
    return read_plugins(allow, deny, cache=settings.cache_folder(), seconds=settings.plugin_seconds)


def _read_locked(settings: Settings, allow: Iterable[str] | None, deny: tuple[str, ...]) -> Plugins:
    """Without the plugins, and the cards whose libraries, differ from the lock; each is a failure.
    A plugin that differs is not imported. Raises SettingsError for a lock that cannot be read, and
    for another core."""
    from attnmux.core.find.lock import Lock  # noqa: PLC0415  # few lock anything

    path = settings.locked_file()
    lock = Lock.read(path)
    core = lock.difference(["attnmux-core"])
    if core:
        raise SettingsError(f"{path}: {core}")
    entries, _ = find_entries(allow, deny)
    refused = [
        (entry, said) for entry in entries if (said := lock.difference([entry.distribution]))
    ]
    plugins = _read(settings, allow, (*deny, *(entry.distribution for entry, _ in refused)))
    kept = []
    for plugin in plugins.loaded:
        by_card = [(card, lock.difference(card.libraries())) for card in plugin.cards]
        kept.append(plugin._replace(cards=tuple(card for card, said in by_card if not said)))
        refused += [(plugin.entry, said) for said in dict.fromkeys(s for _, s in by_card) if said]
    failures = (
        failure_of(
            entry.plugin, entry.distribution, entry.version, "load", PluginError(f"{said} ({path})")
        )
        for entry, said in refused
    )
    return replace(plugins, loaded=tuple(kept), failures=(*plugins.failures, *failures))
