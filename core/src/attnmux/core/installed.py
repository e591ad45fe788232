"""The installed plugins, as far as the environment and the configuration file admit them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from attnmux.core.choosing.ask.policy import Policy
from attnmux.core.choosing.find.plugins import Plugins, is_admitted, read_plugins, several_names
from attnmux.core.settings import Settings


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

    Raises InvalidInput for one text instead of several names, SettingsError for settings that
    cannot be read.
    """
    settings = settings or Settings.load()
    allow = None if allow is None else several_names("allow", allow)
    configured, denied = settings.plugin_filter()
    if configured is not None:
        known = configured if allow is None else allow
        allow = tuple(name for name in known if is_admitted(name, configured, ()))
    plugins = read_plugins(
        allow,
        (*several_names("deny", deny), *denied),
        cache=settings.cache_folder(),
        seconds=settings.plugin_seconds,
    )
    return replace(
        plugins, policy=Policy(allow=settings.allow_backends, deny=settings.deny_backends)
    )
