"""Plugins that are loaded and probed in a child process, as they may crash or hang in drivers."""

from __future__ import annotations

import faulthandler
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import EntryPoint
from typing import IO, Any

from attnmux.core.facts.errors import AttnmuxError
from attnmux.core.facts.platform import Platform
from attnmux.core.find.manager import Manager
from attnmux.core.find.plugin import LONGEST_TRACEBACK, Plugin, PluginFailure, Stage, failed

CHILD = (
    "import gc, sys; gc.disable(); sys.path[:] = {path!r}; "
    "from attnmux.core.find.probes import main; main()"
)
"""It imports, answers and ends: collecting garbage would take longer."""
START_SECONDS = 30
"""For the child to import core."""
STAGES: tuple[Stage, ...] = ("load", "platforms")
"""The child writes a line when it has started, and one after each."""

Lines = queue.SimpleQueue[bytes]


def probe(plugins: Sequence[Plugin], seconds: float) -> list[Plugin]:
    """The plugins with the devices that they find in a child process, or with failures.

    A plugin that ends the child, or takes more than `seconds` to load or to answer, has a failure.
    Another child then asks the plugins after it. Cards are asked for too, unless the plugin has
    `probes`: then it was loaded.
    """
    probed: list[Plugin] = []
    while len(probed) < len(plugins):
        try:
            probed += _in_a_child(plugins[len(probed) :], seconds)
        except OSError as error:
            why = f"no process could be started to load it: {AttnmuxError.in_brief(error)}"
            for plugin in plugins[len(probed) :]:
                probed.append(plugin._replace(failures=(failed(plugin, "load", why),)))
    return probed


def _in_a_child(plugins: Sequence[Plugin], seconds: float) -> Iterator[Plugin]:
    """All plugins, or those up to the first that ends or stops the child. Raises OSError if no
    child can be started."""
    rows = [[*plugin[1:3], plugin.name, plugin.point.value, plugin.probes] for plugin in plugins]
    question = json.dumps({"plugins": rows, "seconds": seconds}).encode()
    with tempfile.TemporaryFile() as noise, _child(question, noise) as (child, lines):
        began = time.monotonic()
        if not (line := _next(lines, START_SECONDS)):
            raise OSError(_end_of(noise) or _why(line, child, began, START_SECONDS))
        for plugin in plugins:
            answers: dict[str, Any] = {}
            began = time.monotonic()
            for stage in STAGES:
                line = _next(lines, seconds)
                if not line:
                    why = _why(line, child, began, seconds)
                    row = failed(plugin, stage, why, _end_of(noise))
                    yield _answered(plugin, answers)._replace(failures=(row,))
                    return
                answers |= json.loads(line)
            yield _answered(plugin, answers)


@contextmanager
def _child(asked: bytes, noise: IO[bytes]) -> Iterator[tuple[subprocess.Popen[bytes], Lines]]:
    """A child and the lines that it writes. It is killed with its group when the block ends."""
    child = subprocess.Popen(
        [sys.executable or "", "-c", CHILD.format(path=sys.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=noise,
        start_new_session=True,
    )
    lines: Lines = queue.SimpleQueue()
    try:
        threading.Thread(target=_read, args=(child.stdout, lines), daemon=True).start()
        if child.stdin is not None:
            with suppress(OSError), child.stdin as stream:  # it ended
                stream.write(asked)
        yield child, lines
    finally:
        with suppress(OSError):
            os.killpg(child.pid, signal.SIGKILL) if hasattr(os, "killpg") else child.kill()
        with suppress(subprocess.TimeoutExpired):  # a driver may hold it
            child.wait(1)


def _read(stream: IO[bytes], lines: Lines) -> None:
    """Every line, then an empty one when the child ends."""
    with stream:
        for line in stream:
            lines.put(line)
    lines.put(b"")


def _next(lines: Lines, seconds: float) -> bytes | None:
    """The next line, None if there is none in time."""
    try:
        return lines.get(timeout=seconds)
    except queue.Empty:
        return None


def _end_of(noise: IO[bytes]) -> str:
    """The end of what was printed on standard error."""
    noise.seek(max(0, noise.seek(0, os.SEEK_END) - LONGEST_TRACEBACK))
    return noise.read().decode(errors="replace")


def _why(line: bytes | None, child: subprocess.Popen[bytes], began: float, seconds: float) -> str:
    """Why no line came in time (None), or why none comes any more, in words."""
    if line is None:
        return f"no answer in {seconds:g} s"
    after = f"after {time.monotonic() - began:.1f} s"
    try:
        code = child.wait(1)
    except subprocess.TimeoutExpired:
        return f"it closed the descriptors of its process {after}"
    if code >= 0:
        return f"its process ended with {code} {after}"
    try:
        return f"killed by {signal.Signals(-code).name} {after}"
    except ValueError:  # real-time signals have no name
        return f"killed by signal {-code} {after}"


def _answered(plugin: Plugin, told: dict[str, Any]) -> Plugin:
    return plugin._replace(
        platforms=tuple(map(Platform.from_dict, told.get("platforms", ()))),
        failures=tuple(PluginFailure(**row) for row in told.get("failures", ())),
        seconds=told.get("seconds", 0.0),
        imports_torch=told.get("imports_torch", False),
    )


def main() -> None:
    """Load the plugins of the request on standard input, and write the answers of their probes."""
    question = json.load(sys.stdin)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what plugins print
    print("started", file=answers, flush=True)
    faulthandler.enable()
    manager, seconds, process = Manager(), question["seconds"], os.getpid()

    def tell(plugin: Plugin, **facts: Any) -> None:  # noqa: ANN401  # plain data
        if os.getpid() != process:  # a copy that the plugin forked would answer too
            os._exit(0)
        facts["failures"] = [failure.to_dict() for failure in plugin.failures]
        print(json.dumps(facts), file=answers, flush=True)

    for distribution, version, name, value, probes in question["plugins"]:
        faulthandler.dump_traceback_later(0.9 * seconds)
        before, began = "torch" in sys.modules, time.monotonic()
        plugin = Plugin(EntryPoint(name, value, ""), distribution, version, probes=probes)
        # One that is known to have a probe was loaded, with its cards, by the parent
        plugin = manager.register(plugin) if probes else manager.load(plugin)
        imports_torch = not before and "torch" in sys.modules
        tell(plugin, seconds=time.monotonic() - began, imports_torch=imports_torch)
        faulthandler.dump_traceback_later(0.9 * seconds)
        if plugin.probes:
            plugin = manager.probe(plugin)
        tell(plugin, platforms=[platform.to_dict() for platform in plugin.platforms])
        faulthandler.cancel_dump_traceback_later()
    os._exit(0)  # threads of plugins would hold it up
