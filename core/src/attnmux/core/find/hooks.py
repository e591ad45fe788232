"""The hooks of a plugin, and the process that imports plugins and calls their hooks."""

from __future__ import annotations

import faulthandler
import json
import os
import reprlib
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import ModuleType
from typing import Any, NoReturn, TypeVar

import pluggy

from attnmux.core.cards.card import BackendCard
from attnmux.core.cards.data import to_data
from attnmux.core.facts.errors import PluginError
from attnmux.core.facts.libraries import Distribution, EntryPoint
from attnmux.core.facts.platform import Platform
from attnmux.core.find.examine import PluginFailure, Stage, failure_of

POLL_SECONDS = 0.002
MOST_FILE_BYTES = 2**26
"""Of a file that a plugin's process writes."""

hookspec = pluggy.HookspecMarker("attnmux")
hookimpl = pluggy.HookimplMarker("attnmux")

T = TypeVar("T")

# A plugin may replace them
_exit, _dumps = os._exit, json.dumps


class HookSpecs:
    """The hooks that a plugin may implement: functions of its module, marked with `hookimpl`."""

    @hookspec
    def attnmux_platforms(self) -> list[Platform]:
        """The devices of this machine that the plugin serves, [] where there are none.

        It runs in a process of its own, with limits on time and memory, and must not create a
        device context. Its exceptions become rows in the report. The answer is kept for a short
        time.
        """
        return []

    @hookspec
    def attnmux_cards(self) -> list[BackendCard]:
        """The cards of the plugin's backends. Must import neither torch nor a kernel library.

        It runs in a process of its own, once for each version of the installed files, on which
        alone the cards may depend.
        """
        return []


class Plugin:
    """A plugin's module, registered. Raises whatever importing raises, and PluginError for anything
    but a module with hooks."""

    def __init__(self, point: EntryPoint) -> None:
        module = point.load()
        if not isinstance(module, ModuleType):
            raise PluginError(f"{point.value} is no module but of type {type(module).__name__}")
        self._manager = pluggy.PluginManager("attnmux")
        self._manager.add_hookspecs(HookSpecs)
        self._manager.register(module, name=point.name)
        self._manager.check_pending()
        for hook in vars(HookSpecs).keys() & vars(module).keys():
            if hook.startswith("attnmux_") and not self.implementations(hook):
                raise PluginError(f"{hook} is not marked with @hookimpl: it would never be called")

    def implementations(self, hook: str) -> Sequence[Callable[[], Any]]:
        """The plugin's function for the hook; empty where it has none."""
        caller: pluggy.HookCaller = getattr(self._manager.hook, hook)
        return [found.function for found in caller.get_hookimpls()]

    def ask(self, hook: str, expected: type[T]) -> list[T]:
        """The hook's answer. Raises whatever it raises, and PluginError for another type."""
        found: list[T] = []
        for implementation in self.implementations(hook):
            answer = implementation()
            if type(answer) is not list or not all(type(each) is expected for each in answer):
                got = reprlib.repr(answer)
                raise PluginError(f"{hook} returned {got}, not a list of {expected.__name__}")
            found += answer
        return found

    def cards(self) -> dict[str, Any]:
        cards = self.ask("attnmux_cards", BackendCard)
        names = [card.name for card in cards]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise PluginError(f"two cards named {', '.join(repeated)}")
        return {"cards": to_data(cards), "probes": bool(self.implementations("attnmux_platforms"))}

    def platforms(self) -> dict[str, Any]:
        return {"platforms": [p.to_dict() for p in self.ask("attnmux_platforms", Platform)]}


def main() -> None:
    """Examine the plugins of the request on standard input, each in a fork of this process."""
    asked = json.load(sys.stdin)
    waiting = list(asked["entries"])
    running: dict[int, tuple[int, float]] = {}
    if not hasattr(os, "fork"):  # then the request has one entry, and this process has limits
        _child(asked, *waiting[0])
    while waiting or running:
        while waiting and len(running) < asked["at_once"]:
            entry = waiting.pop(0)
            pid = os.fork()
            if not pid:
                _child(asked, *entry)
            running[pid] = entry[0], time.monotonic() + asked["seconds"]
        time.sleep(POLL_SECONDS)
        for pid, (place, deadline) in list(running.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if not ended and time.monotonic() < deadline:
                continue
            with suppress(OSError):
                os.killpg(pid, signal.SIGKILL)
            if not ended:
                _, status = os.waitpid(pid, 0)
            _write(asked, place, "ending", _ending(asked, bool(ended), status))
            del running[pid]


def _ending(asked: Mapping[str, Any], ended: bool, status: int) -> str:
    if not ended:
        return f"no answer in {asked['seconds']:g} s"
    if not os.WIFSIGNALED(status):
        code = os.waitstatus_to_exitcode(status)
        return f"its process ended with {code} before it had answered everything"
    number = os.WTERMSIG(status)
    try:
        return f"killed by {signal.Signals(number).name}"
    except ValueError:  # real-time signals have no name
        return f"killed by signal {number}"


def _write(asked: Mapping[str, Any], place: int, kind: str, text: str) -> None:
    """Replace a file as a whole: no reader sees half of it."""
    path = os.path.join(asked["folder"], f"{place}.{kind}")
    draft = f"{path}.{os.getpid()}"
    with open(draft, "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(draft, path)


def _child(
    asked: Mapping[str, Any], place: int, name: str, value: str, distribution: str, version: str
) -> NoReturn:
    """Load a plugin and write its answers.

    The file is replaced after each stage, so that a plugin which hangs or crashes keeps what it has
    answered. The process ends without waiting for threads that the plugin started.
    """
    try:
        # While this process still ends with the group of the first one
        _write(asked, place, "pid", str(os.getpid()))
        _confine(asked, place)
        failures: list[PluginFailure] = []
        told: dict[str, Any] = {}
        examined = os.getpid()

        def tell(stage: str) -> None:
            if os.getpid() != examined:  # a copy that the plugin forked would answer late
                _exit(0)
            told.update(stage=stage, failures=[failure.to_dict() for failure in failures])
            _write(asked, place, "json", _dumps(told))

        def attempt(stage: Stage, work: Callable[[], T]) -> T | None:
            tell(stage)
            try:
                return work()
            except BaseException as error:
                failures.append(failure_of(name, distribution, version, stage, error))
                return None

        point = EntryPoint(name, value, Distribution(""))
        plugin = attempt("load", lambda: Plugin(point))
        if plugin is not None and "cards" in asked["stages"]:
            told.update(attempt("cards", plugin.cards) or {})
        if plugin is not None and "platforms" in asked["stages"]:
            told.update(attempt("platforms", plugin.platforms) or {})
        tell("done")
    finally:
        _exit(1 if sys.exc_info()[0] else 0)


def _confine(asked: Mapping[str, Any], place: int) -> None:
    """Give this process its own session, files and limits, and note what it imports."""
    path = os.path.join(asked["folder"], str(place))
    if hasattr(os, "setsid") and os.getsid(0) != os.getpid():
        os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    errors = os.open(f"{path}.stderr", os.O_WRONLY | os.O_CREAT, 0o600)
    for descriptor, target in ((null, 0), (null, 1), (errors, 2)):
        os.dup2(descriptor, target)
    with suppress(ImportError):
        import resource  # noqa: PLC0415  # not on every operating system

        for limit, value in (
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_DATA, asked["memory"]),
            (resource.RLIMIT_FSIZE, MOST_FILE_BYTES),
        ):
            with suppress(ValueError, OSError):  # a lower limit holds already
                resource.setrlimit(limit, (value, value))
    # A crash, or a hang near the deadline, leaves a traceback in the file
    faulthandler.enable()
    faulthandler.dump_traceback_later(0.9 * asked["seconds"])

    def note(event: str, args: tuple[Any, ...]) -> None:
        if event == "exec" and not (name := str(args[0].co_filename)).startswith("<"):
            with open(f"{path}.files", "ab") as file:
                file.write(os.fsencode(f"{name}\n"))

    sys.addaudithook(note)
