"""The manager that holds the plugins of this process. Each is loaded once."""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import cache
from threading import RLock
from types import ModuleType
from typing import Any, TypeVar

import pluggy

from attnmux.core.facts.checks import refusal
from attnmux.core.facts.errors import AttnmuxError, InvalidInput
from attnmux.core.facts.platform import Platform
from attnmux.core.facts.vendors import VENDORS
from attnmux.core.find.hooks import HOOKS, HookSpecs
from attnmux.core.find.plugin import Plugin, Stage, failure_of

T = TypeVar("T")


class Manager:
    """Loads plugins and calls their hooks. Whatever a plugin raises is a failure of its own."""

    def __init__(self) -> None:
        self._modules = pluggy.PluginManager("attnmux")
        self._modules.add_hookspecs(HookSpecs)
        self._loaded: dict[Plugin, Plugin] = {}
        self._lock = RLock()

    def load(self, plugin: Plugin) -> Plugin:
        """The plugin with its cards, or with a failure. It is imported on the first call."""
        with self._lock:
            if plugin not in self._loaded:
                loaded = self.register(plugin)
                if not loaded.failures:
                    loaded = _attempt(self._with_cards, plugin, "cards")
                if not loaded.failures:
                    loaded = _attempt(self._with_figures, loaded, "figures")
                if not loaded.failures:
                    loaded = _attempt(self._with_advisories, loaded, "advisories")
                self._loaded[plugin] = loaded
            return self._loaded[plugin]

    def register(self, plugin: Plugin) -> Plugin:
        """The plugin, imported once more in a child that asks for its devices alone, or with a
        failure."""
        return _attempt(self._register, plugin, "load")

    def probe(self, plugin: Plugin) -> Plugin:
        """A registered plugin with the devices that it finds, or with a failure."""
        return _attempt(self._with_platforms, plugin, "platforms")

    def _register(self, plugin: Plugin) -> Plugin:
        """Raises whatever importing raises, and AttnmuxError for anything but a module with
        hooks."""
        module = plugin.point.load()
        if not isinstance(module, ModuleType):
            raise AttnmuxError(
                f"{plugin.point.value} is no module but of type {type(module).__name__}"
            )
        self._modules.register(module, name=plugin.key)
        for caller in self._modules.get_hookcallers(module) or ():
            if not caller.has_spec():
                raise AttnmuxError(f"{caller.name} is no hook: expected {' or '.join(HOOKS)}")
        for hook in HOOKS:
            if hook in vars(module) and not self._caller(plugin, hook).get_hookimpls():
                raise AttnmuxError(f"{hook} is not marked with @hookimpl: it would never be called")
        return plugin

    def _with_cards(self, plugin: Plugin) -> Plugin:
        from attnmux.core.cards.card import BackendCard  # noqa: PLC0415  # a child asks for devices

        cards = self._ask(plugin, "attnmux_cards", BackendCard)
        names = [card.name for card in cards]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise AttnmuxError(f"two cards named {', '.join(repeated)}")
        probes = bool(self._caller(plugin, "attnmux_platforms").get_hookimpls())
        return plugin._replace(cards=tuple(cards), probes=probes)

    def _with_figures(self, plugin: Plugin) -> Plugin:
        from attnmux.core.cards.figures import Figures  # noqa: PLC0415  # as above

        return plugin._replace(figures=tuple(self._ask(plugin, "attnmux_figures", Figures)))

    def _with_advisories(self, plugin: Plugin) -> Plugin:
        from attnmux.core.cards.advisory import Advisory  # noqa: PLC0415  # as above

        found = self._ask(plugin, "attnmux_advisories", Advisory)
        return plugin._replace(advisories=tuple(found))

    def _with_platforms(self, plugin: Plugin) -> Plugin:
        platforms = self._ask(plugin, "attnmux_platforms", Platform)
        for platform in platforms:
            check_device(plugin.distribution, platform)
        return plugin._replace(platforms=tuple(platforms))

    def _caller(self, plugin: Plugin, hook: str) -> pluggy.HookCaller:
        """Calls the hook of this plugin alone."""
        every: pluggy.HookCaller = getattr(self._modules.hook, hook)
        others = [
            implementation.plugin
            for implementation in every.get_hookimpls()
            if implementation.plugin_name != plugin.key
        ]
        return self._modules.subset_hook_caller(hook, others)

    def _ask(self, plugin: Plugin, hook: str, expected: type[T]) -> list[T]:
        """The hook's answer. Raises whatever it raises, and AttnmuxError for another type."""
        caller = self._caller(plugin, hook)
        answers: Any = caller()
        called = [
            implementation
            for implementation in caller.get_hookimpls()
            if not (implementation.wrapper or implementation.hookwrapper)
        ]
        if type(answers) is list and len(answers) < len(called):
            answers = [None]  # pluggy drops it
        found: list[T] = []
        for answer in answers if type(answers) is list else [answers]:
            if type(answer) is not list or not all(type(item) is expected for item in answer):
                got = reprlib.repr(answer)
                raise AttnmuxError(f"{hook} returned {got}, not a list of {expected.__name__}")
            found += answer
        return found


@cache
def manager() -> Manager:
    """The manager of this process."""
    return Manager()


def check_device(distribution: str, platform: Platform) -> None:
    """Raise InvalidInput for a device of a vendor in the table, unless its own distribution reports
    one of its architectures."""
    row = VENDORS.get(platform.vendor.lower())
    if row is None:
        return
    from attnmux.core.facts.libraries import canonical  # noqa: PLC0415  # few children find a device

    if canonical(distribution) != row.distribution:
        expected = f"the plugin's own: {row.distribution} reports devices of {row.name}"
        raise refusal("platform, vendor", platform.vendor, expected)
    named = (platform.vendor, platform.device_type, platform.version)
    if named != (row.name, row.device_type, row.version_of(platform.arch)):
        got = f"{platform.vendor}:{platform.arch} on {platform.device_type}, {platform.version}"
        expected = f"an architecture of {row.name}, such as {row.examples}, on {row.device_type}"
        raise InvalidInput("platform, arch", got=got, expected=f"{expected}, with its version")


def _attempt(work: Callable[[Plugin], Plugin], plugin: Plugin, stage: Stage) -> Plugin:
    """The result, or the plugin with a failure. The plugin's output goes to standard error."""
    try:
        with redirect_stdout(sys.stderr):
            return work(plugin)
    except BaseException as error:  # SystemExit too
        return plugin._replace(failures=(failure_of(plugin, stage, error),))
