"""Loading plugins: each on its own, so that a broken one is only a row in a report."""

from __future__ import annotations

import reprlib
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal, TypeVar

import importlib_metadata
import pluggy
from packaging.utils import canonicalize_name

from attnmux.core.choosing.common.checks import nearest
from attnmux.core.choosing.machine.platform import Platform
from attnmux.core.choosing.offer.card import BackendCard, Offer
from attnmux.core.choosing.offer.libraries import entry_points, identity
from attnmux.core.errors import InvalidInput, PluginError

GROUP = "attnmux"
"""The entry-point group; an entry point's name is the plugin's, its value the plugin module."""

hookspec = pluggy.HookspecMarker("attnmux")
hookimpl = pluggy.HookimplMarker("attnmux")

T = TypeVar("T")


class HookSpecs:
    """The hooks that a plugin may implement: functions of its module, marked with `hookimpl`."""

    @hookspec
    def attnmux_platforms(self) -> list[Platform]:
        """The devices of this machine that the plugin serves, [] where there are none.

        It must not create a device context, nor block in a library that keeps the GIL: it runs in a
        thread of its own, which is abandoned when it takes too long. Its exceptions become rows in
        the report.
        """
        return []

    @hookspec
    def attnmux_cards(self) -> list[BackendCard]:
        """The cards of the plugin's backends. Must import neither torch nor a kernel library."""
        return []


Stage = Literal["load", "platforms", "cards"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PluginFailure:
    """A plugin, or one of its hooks, that did not work. The others continue."""

    plugin: str
    distribution: str
    version: str
    stage: Stage
    error: str
    """Type and message, in one line."""
    traceback: str = ""

    def __str__(self) -> str:
        source = f"{self.distribution} {self.version}".strip()
        return f"plugin {self.plugin} ({source or 'of no distribution'}): {self.error}"


def failure_of(
    plugin: str, distribution: str, version: str, stage: Stage, error: BaseException
) -> PluginFailure:
    """The exception as a row of the report."""
    try:
        said = str(error)
    except Exception:
        said = "what it says cannot be read"
    return PluginFailure(
        plugin=plugin,
        distribution=distribution,
        version=version,
        stage=stage,
        error=" ".join(f"{type(error).__name__}: {said}".split()),
        traceback="".join(traceback.format_exception(error)),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Plugin:
    """A loaded plugin module, and its distribution."""

    name: str
    distribution: str
    version: str
    module: ModuleType


class Plugins:
    """The plugins that were loaded, and why the others were not."""

    def __init__(
        self, plugins: Iterable[Plugin] = (), failures: Iterable[PluginFailure] = ()
    ) -> None:
        self._manager = pluggy.PluginManager("attnmux")
        self._manager.add_hookspecs(HookSpecs)
        self._failures = list(failures)
        self.loaded: tuple[Plugin, ...] = tuple(filter(self._register, plugins))
        self._offers: tuple[Offer, ...] | None = None

    @property
    def failures(self) -> tuple[PluginFailure, ...]:
        """All rows so far: asking for cards or platforms can add more."""
        return tuple(self._failures)

    def _register(self, plugin: Plugin) -> bool:
        try:
            self._manager.register(plugin.module, name=plugin.name)
            self._manager.check_pending()
            for hook in vars(HookSpecs).keys() & vars(plugin.module).keys():
                if hook.startswith("attnmux_") and not self._implementations(plugin, hook):
                    raise PluginError(
                        f"{hook} is not marked with @hookimpl: it would never be called"
                    )
        except Exception as error:
            # The half-registered module would make every later check_pending fail again
            if self._manager.has_plugin(plugin.name):
                self._manager.unregister(name=plugin.name)
            self._fail(plugin, "load", error)
            return False
        return True

    def _fail(self, plugin: Plugin, stage: Stage, error: BaseException) -> None:
        self._failures.append(
            failure_of(plugin.name, plugin.distribution, plugin.version, stage, error)
        )

    def offers(self) -> tuple[Offer, ...]:
        """Every card with the plugin that brought it."""
        if self._offers is None:
            self._offers = tuple(
                Offer(
                    card=card,
                    plugin=plugin.name,
                    distribution=plugin.distribution,
                    version=plugin.version,
                )
                for plugin in self.loaded
                for card in self._cards(plugin)
            )
        return self._offers

    def _cards(self, plugin: Plugin) -> Sequence[BackendCard]:
        try:
            cards = self._ask(plugin, "attnmux_cards", BackendCard)
            names = [card.name for card in cards]
            repeated = sorted({name for name in names if names.count(name) > 1})
            if repeated:
                raise PluginError(f"two cards named {', '.join(repeated)}")
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self._fail(plugin, "cards", error)
            return ()
        return cards

    def probes(self, plugin: Plugin) -> bool:
        """Whether the plugin implements the probe at all."""
        return bool(self._implementations(plugin, "attnmux_platforms"))

    def platforms_of(self, plugin: Plugin) -> Sequence[Platform]:
        """The devices that the plugin's probe finds. Raises the probe's exceptions."""
        return self._ask(plugin, "attnmux_platforms", Platform)

    def record(self, plugin: Plugin, error: BaseException) -> None:
        """Add a row: the plugin's probe failed."""
        self._fail(plugin, "platforms", error)

    def _implementations(self, plugin: Plugin, hook: str) -> Sequence[Callable[[], Any]]:
        """The plugin's function for the hook; empty where it has none."""
        caller: pluggy.HookCaller = getattr(self._manager.hook, hook)
        return [found.function for found in caller.get_hookimpls() if found.plugin is plugin.module]

    def _ask(self, plugin: Plugin, hook: str, expected: type[T]) -> list[T]:
        found: list[T] = []
        for implementation in self._implementations(plugin, hook):
            answer = implementation()
            if not isinstance(answer, list) or not all(isinstance(x, expected) for x in answer):
                got = reprlib.repr(answer)
                raise PluginError(f"{hook} returned {got}, not a list of {expected.__name__}")
            found += answer
        return found


class Entry:
    """An entry point and its distribution."""

    def __init__(self, point: importlib_metadata.EntryPoint) -> None:
        self.point = point
        self.distribution, self.version = identity(point.dist)

    @property
    def names(self) -> set[str]:
        return {canonicalize_name(self.point.name), canonicalize_name(self.distribution)}

    @property
    def identity(self) -> tuple[str, str, str]:
        """A unique key, also for sorting."""
        return self.point.name, self.distribution, self.point.value


def find_entries(
    allow: Iterable[str] | None = None, deny: Iterable[str] = ()
) -> tuple[Sequence[Entry], Sequence[PluginFailure]]:
    """The installed plugins that are admitted, and those that cannot be read. Imports none.

    Raises InvalidInput for one text instead of several names.
    """
    for argument, names in (("allow", allow), ("deny", deny)):
        if isinstance(names, str):
            raise InvalidInput(argument, got=repr(names), expected="several names, in a list")
    allowed = None if allow is None else set(map(canonicalize_name, allow))
    denied = set(map(canonicalize_name, deny))
    points, unreadable = entry_points(GROUP)
    entries = [
        entry
        for entry in map(Entry, points)
        if (allowed is None or entry.names & allowed) and not entry.names & denied
    ]
    entries.sort(key=lambda entry: entry.identity)
    return entries, [failure_of(name, name, "", "load", error) for name, error in unreadable]


def unknown_plugins(names: Iterable[str]) -> dict[str, str]:
    """The names that no installed plugin or distribution has, each with the most similar name, or
    with an empty text."""
    entries, _ = find_entries()
    known = {name for entry in entries for name in entry.names}
    return {
        name: nearest(name, sorted(known)) for name in names if canonicalize_name(name) not in known
    }


def load_plugins(allow: Iterable[str] | None = None, deny: Iterable[str] = ()) -> Plugins:
    """Load the installed plugins, each on its own.

    `allow` (None: all) and `deny` name plugins or distributions; other plugins are not imported. A
    plugin that raises, exits, or shares its name with another is a failure in the result, never an
    exception. Raises InvalidInput for one text instead of several names.
    """
    entries, unreadable = find_entries(allow, deny)
    return load_entries(entries, among=entries, failures=unreadable)


def load_entries(
    entries: Iterable[Entry], *, among: Sequence[Entry], failures: Iterable[PluginFailure] = ()
) -> Plugins:
    """Load `entries`, a part of those `among` which every name must be unique."""
    plugins = []
    failures = list(failures)
    for entry in entries:
        try:
            plugins.append(_load(entry, among))
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            failures.append(
                failure_of(entry.point.name, entry.distribution, entry.version, "load", error)
            )
    return Plugins(plugins, failures)


def _load(entry: Entry, entries: Sequence[Entry]) -> Plugin:
    name = entry.point.name
    sharing = sorted(other.distribution for other in entries if other.point.name == name)
    if len(sharing) > 1:
        raise PluginError(
            f"the plugin name {name!r} belongs to {' and '.join(sharing)}: "
            "deny one of the distributions (deny_plugins)"
        )
    module = entry.point.load()
    if not isinstance(module, ModuleType):
        raise PluginError(f"{entry.point.value} is no module but of type {type(module).__name__}")
    return Plugin(name=name, distribution=entry.distribution, version=entry.version, module=module)
