"""Plugins are imported in processes of their own, with limits, and answer in plain data.

The first process (`hooks.main`) imports no plugin. It forks one process for each, so that neither
an early exit nor a crash, an endless loop or a changed module of one plugin reaches another.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from attnmux.core.cards.card import BackendCard
from attnmux.core.cards.data import from_data, to_data
from attnmux.core.facts.checks import refusal
from attnmux.core.facts.errors import InvalidInput, in_brief
from attnmux.core.facts.files import read_file
from attnmux.core.facts.frozen import FrozenMapping, Plain
from attnmux.core.facts.libraries import EntryPoint, canonical, printable
from attnmux.core.facts.platform import Platform
from attnmux.core.facts.vendors import VENDORS
from attnmux.core.find.store import search_path

CHILD = "import sys; sys.path[:] = {path!r}; from attnmux.core.find.hooks import main; main()"
MEMORY_BYTES = 2**31
"""Data that a plugin's process may hold. Importing cards takes a fiftieth."""
MOST_BYTES = 8_000_000
"""Of an answer."""
MOST_ERROR = 1000
MOST_PLATFORMS = 64
MOST_OF_DEVICES: Mapping[str, int] = FrozenMapping(
    {"count": 1024, "memory_bytes": 2**46, "core_count": 2**20}
)
"""Beyond any machine: a greater number is a fault of the probe."""
LONGEST_TRACEBACK = 20_000
START_SECONDS = 10
"""For the first process to import core."""
AT_ONCE = 4
"""Processes at a time."""

Stage = Literal["load", "cards", "platforms"]


class Entry(NamedTuple):
    """An entry point of a plugin, and its distribution."""

    point: EntryPoint
    distribution: str
    version: str

    @property
    def plugin(self) -> str:
        return self.point.name

    @property
    def key(self) -> str:
        """Unique, also for sorting."""
        return f"{self.plugin} = {self.point.value} ({self.distribution} {self.version})"


@dataclass(frozen=True, kw_only=True, slots=True)
class PluginFailure(Plain):
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
    import traceback  # noqa: PLC0415  # off the path without a failure

    try:
        said = str(error)
    except BaseException:  # it is the plugin's own code that fails
        said = "its message cannot be read"
    try:
        trace = "".join(traceback.format_exception(error))
    except BaseException:
        trace = "".join(traceback.format_tb(error.__traceback__))
    return PluginFailure(
        plugin=plugin,
        distribution=distribution,
        version=version,
        stage=stage,
        error=_line(f"{type(error).__name__}: {said}"),
        traceback=_lines(trace),
    )


def _line(text: str) -> str:
    return printable(" ".join(text[:MOST_ERROR].split()))


def _lines(text: str) -> str:
    return "\n".join(map(printable, text[-LONGEST_TRACEBACK:].splitlines()))


class Plugin(NamedTuple):
    """The answers that a plugin gave."""

    entry: Entry
    cards: tuple[BackendCard, ...] = ()
    platforms: tuple[Platform, ...] = ()
    probes: bool = False
    """Whether the plugin implements the probe."""
    files: tuple[str, ...] = ()
    """Those that were imported with the plugin."""
    failures: tuple[PluginFailure, ...] = ()

    @property
    def name(self) -> str:
        return self.entry.plugin

    @property
    def distribution(self) -> str:
        return self.entry.distribution

    def to_data(self) -> dict[str, Any]:
        """The answers as plain data, to be kept; without the files."""
        return {
            "cards": to_data(self.cards),
            "platforms": [platform.to_dict() for platform in self.platforms],
            "probes": self.probes,
            "failures": [failure.to_dict() for failure in self.failures],
        }

    @classmethod
    def of_data(cls, entry: Entry, data: Mapping[str, Any]) -> Plugin:
        """The inverse of `to_data`; raises any exception for other data."""
        return cls(
            entry=entry,
            cards=from_data(data["cards"], checked=True),
            platforms=tuple(map(Platform.from_dict, data["platforms"])),
            probes=data["probes"],
            failures=tuple(PluginFailure(**failure) for failure in data["failures"]),
        )


def answers_of(
    entries: Sequence[Entry],
    kept: Mapping[str, Plugin | None],
    stages: Sequence[Stage],
    seconds: float,
) -> tuple[list[Plugin], list[Plugin]]:
    """The answers of all entries, and of those alone that had none in `kept`, by key, and are
    examined now."""
    new = examine([each for each in entries if kept.get(each.key) is None], stages, seconds)
    found = {each.entry.key: each for each in (*filter(None, kept.values()), *new)}
    return [found[each.key] for each in entries], new


def examine(entries: Sequence[Entry], stages: Sequence[Stage], seconds: float) -> list[Plugin]:
    """Load each plugin in a process of its own, and ask it for cards, devices or both (`stages`).

    A plugin that does not answer in `seconds`, or whose process ends early, is killed with all
    processes of its group, and gets a failure at the stage that it had reached.
    """
    if not entries:
        return []
    from tempfile import TemporaryDirectory  # noqa: PLC0415  # off the path of plugins known

    with TemporaryDirectory(prefix="attnmux-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        if hasattr(os, "fork"):
            _run(folder, entries, range(len(entries)), stages, seconds)
        for place in range(len(entries)):
            # A plugin ended the first process too, or there is no fork here
            if not (folder / f"{place}.ending").exists():
                _run(folder, entries, [place], stages, seconds)
        return [_examined(folder, place, entry) for place, entry in enumerate(entries)]


def _run(
    folder: Path,
    entries: Sequence[Entry],
    places: Sequence[int],
    stages: Sequence[Stage],
    seconds: float,
) -> None:
    """Examine the entries at `places`; their answers are in `folder` afterwards."""
    import subprocess  # noqa: PLC0415  # as above

    request = {
        "folder": str(folder),
        "entries": [[place, *entries[place].point[:2], *entries[place][1:]] for place in places],
        "stages": list(stages),
        "seconds": seconds,
        "memory": MEMORY_BYTES,
        "at_once": AT_ONCE,
    }
    rounds = -(-len(places) // AT_ONCE)
    ending = ""
    try:
        process = subprocess.Popen(
            [sys.executable or "", "-c", CHILD.format(path=search_path())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        ending = f"no process could be started to examine it: {in_brief(error)}"
    else:
        try:
            _, said = process.communicate(
                json.dumps(request).encode(), START_SECONDS + rounds * seconds
            )
            ending = f"the process that examines it ended with {process.returncode}: "
            ending += said.decode(errors="replace")[-300:]
        except subprocess.TimeoutExpired:
            ending = f"no answer in {seconds:g} s"
        finally:
            _kill(process.pid)
            process.wait()
            for pid in _running(folder, places):  # it starts no more of them
                _kill(pid)
    if len(places) == 1 and not (folder / f"{places[0]}.ending").exists():
        (folder / f"{places[0]}.ending").write_text(ending, encoding="utf-8")


def _running(folder: Path, places: Sequence[int]) -> list[int]:
    """Processes of plugins that outlived the first process."""
    found = []
    for place in places:
        with suppress(OSError, ValueError):
            if not (folder / f"{place}.ending").exists():
                found.append(int((folder / f"{place}.pid").read_text()))
    return found


def _kill(pid: int) -> None:
    """End a process and its group, if the kernel can."""
    import signal  # noqa: PLC0415  # off the path of plugins that are known

    with suppress(OSError):
        os.killpg(pid, signal.SIGKILL) if hasattr(os, "killpg") else os.kill(pid, signal.SIGTERM)


def _examined(folder: Path, place: int, entry: Entry) -> Plugin:
    """The answers of one plugin, each checked: it could have written anything."""
    told: dict[str, Any] = {"stage": "load"}
    failures: list[PluginFailure] = []

    def fail(stage: Stage, error: str, trace: str = "") -> None:
        who = {"plugin": entry.plugin, "distribution": entry.distribution, "version": entry.version}
        failures.append(
            PluginFailure(**who, stage=stage, error=_line(error), traceback=_lines(trace))
        )

    def text(kind: str) -> str:
        try:
            path = str(folder / f"{place}.{kind}")
            return read_file(path, MOST_BYTES).decode("utf-8", errors="replace")
        except FileNotFoundError:
            return ""

    cards: tuple[BackendCard, ...] = ()
    platforms: tuple[Platform, ...] = ()
    stage: Stage = "load"
    try:
        answer = text("json")
        told = json.loads(answer) if answer else told
        for row in told.get("failures", ()):
            fail(row["stage"], str(row["error"]), str(row["traceback"]))
        if told["stage"] != "done":
            fail(told["stage"], text("ending"), text("stderr"))
        stage = "cards"
        if "cards" in told:
            cards = from_data(told["cards"], checked=False)
        stage = "platforms"
        rows = told.get("platforms", ())[:MOST_PLATFORMS]
        platforms = tuple(_platform(entry, row) for row in rows)
    except Exception as error:
        fail(stage, f"its answer cannot be used: {in_brief(error)}")
    return Plugin(
        entry=entry,
        cards=cards,
        platforms=platforms,
        probes=told.get("probes") is True,
        files=tuple(dict.fromkeys(text("files").splitlines())),
        failures=tuple(failures),
    )


def _platform(entry: Entry, data: Mapping[str, Any]) -> Platform:
    """Raises InvalidInput for text that could deceive a terminal, for sizes that no device has, and
    for a device of a vendor in the table unless its own distribution reports one of its
    architectures."""
    for value in (*data.values(), *data.get("features", ())):
        if isinstance(value, str) and not value.isprintable():
            expected = "text without control characters"
            raise InvalidInput("platform", got=repr(value), expected=expected)
    platform = Platform.from_dict(data)
    for name, most in MOST_OF_DEVICES.items():
        if getattr(platform, name) > most:
            raise refusal(f"platform, {name}", getattr(platform, name), f"at most {most}")
    row = VENDORS.get(platform.vendor.lower())
    if row is None:
        return platform
    if canonical(entry.distribution) != row.distribution:
        expected = f"the plugin's own: {row.distribution} reports devices of {row.name}"
        raise refusal("platform, vendor", platform.vendor, expected)
    named = (platform.vendor, platform.device_type, platform.version)
    if named != (row.name, row.device_type, row.version_of(platform.arch)):
        got = f"{platform.vendor}:{platform.arch} on {platform.device_type}, {platform.version}"
        expected = f"an architecture of {row.name}, such as {row.examples}, on {row.device_type}"
        raise InvalidInput("platform, arch", got=got, expected=f"{expected}, with its version")
    return platform
