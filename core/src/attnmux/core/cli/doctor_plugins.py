"""Each plugin is examined in a process of its own, since it may hang, crash or exit."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from attnmux.core.choosing.ask.policy import Policy
from attnmux.core.choosing.find.plugins import (
    Entry,
    PluginFailure,
    Plugins,
    Stage,
    find_entries,
    load_entries,
)
from attnmux.core.choosing.judge.checking import install_hint, standing
from attnmux.core.choosing.machine.platform import Platform
from attnmux.core.choosing.offer.card import BackendCard, Offer
from attnmux.core.choosing.offer.libraries import installed_version, parsed_requirement, within
from attnmux.core.settings import Settings

CHILD = (
    "import sys; sys.path[:] = {path!r}; "
    "from attnmux.core.cli.doctor_plugins import main; main(sys.argv[1])"
)
AT_ONCE = 4
"""Processes at a time."""
POLL_SECONDS = 0.01
LONGEST_TRACEBACK = 20_000
STATES = ("present", "too old", "too new", "missing")
"""Of a required library, best first."""
LOWER_BOUNDS = (">=", ">", "~=", "==")


@dataclass(frozen=True, kw_only=True, slots=True)
class Examined:
    """A plugin's answers, as far as it gave them."""

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
    """Load each plugin in a process of its own, and ask it for cards and devices.

    A plugin that does not answer in `seconds`, or whose process ends early, is killed with all
    processes that it started, and gets a failure at the stage that it had reached.
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
            # An interrupted doctor must not leave processes running
            for child in running.values():
                child.kill()
    return [found[place] for place in sorted(found)]


class Child:
    """The process that examines one plugin."""

    def __init__(self, entry: Entry, settings: Settings, seconds: float, folder: Path) -> None:
        folder.mkdir()
        self._identity = {
            "plugin": entry.point.name,
            "distribution": entry.distribution,
            "version": entry.version,
        }
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
            "traceback_at": time.time() + 0.9 * seconds,
        }
        # A file: processes that the plugin started could hold a pipe open after it is killed
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
        """Whether the process has ended. At the deadline it is killed first."""
        code = self._process.poll()
        if code is None and time.monotonic() < self._deadline:
            return False
        if code is None:
            self._ending = f"no answer in {self._seconds:g} s"
        elif code < 0:
            self._ending = f"killed by {_signal_name(-code)}"
        else:
            self._ending = f"its process ended with {code} before it had answered everything"
        self.kill()
        return True

    def kill(self) -> None:
        """End the process and those that it started, if the kernel can."""
        with suppress(OSError):
            if hasattr(os, "killpg"):  # not on every operating system
                os.killpg(self._process.pid, signal.SIGKILL)
            else:
                self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(1)

    def examined(self) -> Examined:
        """Its answers, and a failure where some are missing."""
        told: dict[str, Any] = {"stage": "load"}
        if self._answer.exists():
            told = json.loads(self._answer.read_text(encoding="utf-8"))
        failures = [PluginFailure(**row) for row in told.get("failures", ())]
        if told["stage"] != "done":
            failures.append(self._failure(told["stage"]))
        return Examined(
            **self._identity,
            backends=tuple(told.get("backends", ())),
            platforms=tuple(map(Platform.from_dict, told.get("platforms", ()))),
            failures=tuple(failures),
        )

    def _failure(self, stage: Stage) -> PluginFailure:
        text = self._errors.read_text(encoding="utf-8", errors="replace")
        traceback = text[-LONGEST_TRACEBACK:]
        return PluginFailure(**self._identity, stage=stage, error=self._ending, traceback=traceback)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # real-time signals have no name
        return f"signal {number}"


def main(request: str) -> None:
    """The child process: load the plugin that `request` (JSON) names and write its answers.

    The answer file is replaced after each stage, so that a plugin which hangs or crashes keeps what
    it has answered. The process ends without waiting for threads that the plugin started.
    """
    asked = json.loads(request)
    answer = Path(asked["answer"])
    # A crash, or a hang near the deadline, leaves a traceback on stderr, which is a file
    faulthandler.enable()
    faulthandler.dump_traceback_later(max(0.1, asked["traceback_at"] - time.time()))
    told: dict[str, Any] = {}

    def tell(stage: str, **facts: object) -> None:
        told.update(facts, stage=stage)
        draft = answer.with_suffix(".draft")
        draft.write_text(json.dumps(told), encoding="utf-8")
        draft.replace(answer)

    tell("load")
    among, _ = find_entries(asked["allow"], asked["deny"])
    mine = [entry for entry in among if entry.identity == tuple(asked["identity"])]
    plugins = load_entries(mine, among=among)
    tell("cards", failures=_failures(plugins))
    allowed, denied = asked["backends"]
    policy = Policy(allow=None if allowed is None else tuple(allowed), deny=tuple(denied))
    backends = [_backend(offer, policy) for offer in plugins.offers()]
    tell("platforms", failures=_failures(plugins), backends=backends)
    platforms = _platforms(plugins)
    found = [platform.to_dict() for platform in platforms]
    tell("done", failures=_failures(plugins), platforms=found)
    sys.stderr.flush()
    os._exit(0)


def _failures(plugins: Plugins) -> list[dict[str, Any]]:
    return [asdict(failure) for failure in plugins.failures]


def _platforms(plugins: Plugins) -> list[Platform]:
    found: list[Platform] = []
    for plugin in plugins.loaded:
        try:
            found += plugins.platforms_of(plugin)
        except BaseException as error:
            plugins.record(plugin, error)
    return found


def _backend(offer: Offer, policy: Policy) -> dict[str, Any]:
    reasons = standing(offer, policy, installed_version)
    return {
        "name": offer.card.name,
        "address": offer.address,
        "status": offer.card.status,
        "vendors": _vendors(offer.card),
        "reasons": [asdict(reason) for reason in reasons],
        "libraries": libraries(offer.card, offer.distribution),
    }


def _vendors(card: BackendCard) -> list[str]:
    """The vendors that the card serves; empty where a clause does not list them."""
    listed = [clause.vendor.examples() for clause in card.clauses]
    return sorted({str(name) for names in listed for name in names}) if all(listed) else []


def libraries(card: BackendCard, distribution: str) -> list[dict[str, str]]:
    """Each requirement of the card: wanted, installed, state, and the command that fixes it.

    The state is that of the closest alternative: "present", "too old", "too new" or "missing".
    Requirements whose marker does not hold here are skipped.
    """
    rows = []
    for alternatives in card.requirements():
        parsed = [parsed_requirement(text) for text in alternatives]
        here = [one for one in parsed if one.marker is None or one.marker.evaluate()]
        if len(here) < len(parsed):
            continue
        states = [(*_state(one), one) for one in here]
        state, version, closest = min(states, key=lambda row: STATES.index(row[0]))
        hint = "" if state == "present" else install_hint(card, distribution, alternatives[0])
        rows.append(
            {
                "wanted": " or ".join(alternatives),
                "installed": f"{closest.name} {version}".strip() if version else "",
                "state": state,
                "hint": hint,
            }
        )
    return rows


def _state(requirement: Requirement) -> tuple[str, str]:
    version = installed_version(requirement.name)
    if version is None:
        return "missing", ""
    if within(version, str(requirement.specifier)):
        return "present", version
    try:
        older = any(
            spec.operator in LOWER_BOUNDS
            and Version(version) < Version(spec.version.removesuffix(".*"))
            for spec in requirement.specifier
        )
    except InvalidVersion:
        older = True
    return ("too old" if older else "too new"), version
