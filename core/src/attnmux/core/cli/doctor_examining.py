"""Examining each plugin in a subprocess, so that whatever it does is a row."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from attnmux.core.choosing.platform import Platform
from attnmux.core.choosing.plugins import Entry, PluginFailure
from attnmux.core.settings import Settings

CHILD = (
    "import sys; sys.path[:] = {path!r}; "
    "from attnmux.core.cli.doctor_child import main; main(sys.argv[1])"
)
AT_ONCE = 4
"""Processes at a time: most of what one does is importing."""
LONGEST_TRACEBACK = 20_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Examined:
    """A plugin, as far as it could be asked."""

    plugin: str
    distribution: str
    version: str
    backends: tuple[Mapping[str, Any], ...] = ()
    """Name, address, status, reasons and libraries of each."""
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
    with (
        TemporaryDirectory(prefix="attnmux-doctor-") as folder,
        ThreadPoolExecutor(max_workers=AT_ONCE) as pool,
    ):
        folders = [Path(folder) / str(number) for number in range(len(entries))]
        jobs = [
            pool.submit(_examine, entry, settings, seconds, own)
            for entry, own in zip(entries, folders, strict=True)
        ]
        return [job.result() for job in jobs]


def _examine(entry: Entry, settings: Settings, seconds: float, folder: Path) -> Examined:
    folder.mkdir()
    answer, errors = folder / "answer", folder / "stderr"
    allow, deny = settings.plugin_filter()
    request = {
        "identity": entry.identity,
        "allow": allow,
        "deny": deny,
        "answer": str(answer),
        "seconds": 0.9 * seconds,
    }
    ending = _run(request, errors, seconds)
    told: dict[str, Any] = {"stage": "load"}
    if answer.exists():
        told = json.loads(answer.read_text(encoding="utf-8"))
    failures = [PluginFailure(**row) for row in told.get("failures", ())]
    if told["stage"] != "done":
        text = errors.read_text(encoding="utf-8", errors="replace")
        failures.append(
            PluginFailure(
                plugin=entry.point.name,
                distribution=entry.distribution,
                version=entry.version,
                stage=told["stage"],
                error=ending,
                traceback=text[-LONGEST_TRACEBACK:],
            )
        )
    return Examined(
        plugin=entry.point.name,
        distribution=entry.distribution,
        version=entry.version,
        backends=tuple(told.get("backends", ())),
        platforms=tuple(map(Platform.from_dict, told.get("platforms", ()))),
        failures=tuple(failures),
    )


def _run(request: Mapping[str, Any], errors: Path, seconds: float) -> str:
    """Run the child; how it ended, in words."""
    # A file, not a pipe: what the plugin started may hold a pipe open long after it was killed
    with errors.open("wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-c", CHILD.format(path=sys.path), json.dumps(request)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            start_new_session=True,
        )
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        return f"no answer in {seconds:g} s"
    finally:
        _kill(process)
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"its process ended with {code} before all was answered"


def _kill(process: subprocess.Popen[bytes]) -> None:
    """The process and what it started; one that the kernel cannot end is left behind."""
    with suppress(OSError):
        if hasattr(os, "killpg"):  # not on every operating system
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
    with suppress(subprocess.TimeoutExpired):
        process.wait(1)
