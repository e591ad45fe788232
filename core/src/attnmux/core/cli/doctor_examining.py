"""Examining each plugin in a subprocess, so that whatever it does is a row."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from attnmux.core.choosing.find.plugins import Entry, PluginFailure, Stage
from attnmux.core.choosing.machine.platform import Platform
from attnmux.core.settings import Settings

CHILD = (
    "import sys; sys.path[:] = {path!r}; "
    "from attnmux.core.cli.doctor_child import main; main(sys.argv[1])"
)
AT_ONCE = 4
"""Processes at a time: most of what one does is importing."""
POLL_SECONDS = 0.01
LONGEST_TRACEBACK = 20_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Examined:
    """A plugin, as far as it could be asked."""

    plugin: str
    distribution: str
    version: str
    backends: tuple[Mapping[str, Any], ...] = ()
    """Name, address, status, vendors, reasons and libraries of each."""
    platforms: tuple[Platform, ...] = ()
    failures: tuple[PluginFailure, ...] = ()

    @property
    def status(self) -> str:
        return "broken" if self.failures else "works"


def examine(entries: Sequence[Entry], settings: Settings, seconds: float) -> list[Examined]:
    """Load each plugin and ask it for cards and devices, in a process of its own.

    One that gives no answer in `seconds`, or whose process ends early, is killed with all that it
    started, and has a failure at the stage that it had reached.
    """
    found: dict[int, Examined] = {}
    waiting = list(enumerate(entries))
    running: dict[int, Child] = {}
    with TemporaryDirectory(prefix="attnmux-doctor-") as folder:
        try:
            while waiting or running:
                while waiting and len(running) < AT_ONCE:
                    place, entry = waiting.pop(0)
                    running[place] = Child(entry, settings, seconds, Path(folder, str(place)))
                for place, child in list(running.items()):
                    if child.ended():
                        found[place] = running.pop(place).examined()
                time.sleep(POLL_SECONDS)
        finally:
            # Whoever interrupts a doctor that waits for a plugin must not leave the plugin behind
            for child in running.values():
                child.kill()
    return [found[place] for place in sorted(found)]


class Child:
    """The process that examines one plugin."""

    def __init__(self, entry: Entry, settings: Settings, seconds: float, folder: Path) -> None:
        folder.mkdir()
        self._entry = entry
        self._answer, self._errors = folder / "answer", folder / "stderr"
        self._seconds = seconds
        self._ending = ""
        allow, deny = settings.plugin_filter()
        request = {
            "identity": entry.identity,
            "allow": allow,
            "deny": deny,
            "backends": (settings.allow_backends, settings.deny_backends),
            "answer": str(self._answer),
            "seconds": 0.9 * seconds,
        }
        # A file, not a pipe: what the plugin started may hold a pipe open after it was killed
        with self._errors.open("wb") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, "-c", CHILD.format(path=sys.path), json.dumps(request)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                start_new_session=True,
            )
        self._deadline = time.monotonic() + seconds

    def ended(self) -> bool:
        """Whether the process has ended or has had its time; then nothing of it is left."""
        code = self._process.poll()
        if code is None and time.monotonic() < self._deadline:
            return False
        if code is None:
            self._ending = f"no answer in {self._seconds:g} s"
        elif code < 0:
            self._ending = f"killed by {_signal_name(-code)}"
        else:
            self._ending = f"its process ended with {code} before all was answered"
        self.kill()
        return True

    def kill(self) -> None:
        """End the process and what it started; what the kernel cannot end is left behind."""
        with suppress(OSError):
            if hasattr(os, "killpg"):  # not on every operating system
                os.killpg(self._process.pid, signal.SIGKILL)
            else:
                self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(1)

    def examined(self) -> Examined:
        """What it answered, and a failure where that is not all."""
        told: dict[str, Any] = {"stage": "load"}
        if self._answer.exists():
            told = json.loads(self._answer.read_text(encoding="utf-8"))
        failures = [PluginFailure(**row) for row in told.get("failures", ())]
        if told["stage"] != "done":
            failures.append(self._failure(told["stage"]))
        return Examined(
            plugin=self._entry.point.name,
            distribution=self._entry.distribution,
            version=self._entry.version,
            backends=tuple(told.get("backends", ())),
            platforms=tuple(map(Platform.from_dict, told.get("platforms", ()))),
            failures=tuple(failures),
        )

    def _failure(self, stage: Stage) -> PluginFailure:
        text = self._errors.read_text(encoding="utf-8", errors="replace")
        return PluginFailure(
            plugin=self._entry.point.name,
            distribution=self._entry.distribution,
            version=self._entry.version,
            stage=stage,
            error=self._ending,
            traceback=text[-LONGEST_TRACEBACK:],
        )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
