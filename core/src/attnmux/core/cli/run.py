"""One invocation of the command, which every verb shares, and the options of all verbs."""

from __future__ import annotations

import errno
import gc
import io
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from attnmux.core.facts.errors import (
    AmbiguousPlatform,
    AttnmuxError,
    InvalidInput,
    NoBackend,
    SettingsError,
    UnknownBackend,
)
from attnmux.core.facts.frozen import FrozenMapping
from attnmux.core.find.devices import Detection
from attnmux.core.find.plugins import Plugins, unknown_plugins
from attnmux.core.find.settings import Settings
from attnmux.core.measured.unverified import Unverified, doubtful

if TYPE_CHECKING:
    from concurrent.futures import Future

    from attnmux.core.cards.card import Offer
    from attnmux.core.choosing.decision import Decision
    from attnmux.core.facts.launches import TunedLaunch
    from attnmux.core.facts.platform import Platform
    from attnmux.core.measured.measurement import Measurement


UNWRITABLE = (errno.ENOSPC, errno.EPIPE)
USAGE, NOTHING_FITS, FAILURE, INTERRUPTED, TERMINATED = 2, 3, 1, 130, 143


class Run:
    """One invocation of the command."""

    def __init__(self) -> None:
        self.debug = False
        self.no_plugins = False
        self.warnings: list[str] = []
        """Printed on stderr, and part of a JSON answer."""
        self.answer: TextIO | None = None
        """Where an answer in JSON goes, while everything else that is printed goes to stderr."""
        self._early: tuple[Settings, Plugins, Future[Detection]] | None = None

    def settings(self, **flags: str) -> Settings:
        """The settings, with the flags that options turn on: each with the name of the option, ""
        for one that was not given."""
        settings = Settings.load()
        self.debug = self.debug or settings.debug
        flags["no_plugins"] = "--no-plugins" if self.no_plugins else ""
        given = {name: option for name, option in flags.items() if option}
        if not given:
            return settings
        turned_on: dict[str, Any] = dict.fromkeys(given, True)
        sources = FrozenMapping({**settings.sources, **given})
        return replace(settings, **turned_on, sources=sources)

    @contextmanager
    def importing(
        self,
        settings: Settings,
        then: Callable[[Sequence[Offer], Platform], object] = lambda *_: None,
    ) -> Iterator[None]:
        """Ask the probes while the block imports what a verb needs, for `plugins` and `detect` with
        these settings.

        then: called in a thread with the backends and the platform of the settings, unless it is
        ambiguous. Its errors are dropped.

        The probes have a process of their own. Without collections meanwhile, an import of torch
        and transformers takes a fifth less time: it allocates much and frees nothing.
        """
        from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415  # few verbs need it

        plugins, pool, known = self.plugins(settings), ThreadPoolExecutor(1), len(sys.modules)
        try:
            with without_collections():
                found = pool.submit(plugins.detect)
                self._early = settings, plugins, found
                pool.submit(lambda: then(plugins.offers(), found.result().pick(settings.platform)))
                yield
                if len(sys.modules) > known:
                    # Imported modules stay: later collections can skip them
                    gc.freeze()
        finally:
            pool.shutdown(wait=False)

    def plugins(self, settings: Settings) -> Plugins:
        """The plugins, with a warning for each that is broken."""
        if self._early is not None and self._early[0] is settings:
            return self._early[1]
        with without_collections():
            plugins = Plugins.load(settings=settings)
        for failure in plugins.failures:
            self.warn(str(failure))
        allowed, _ = settings.plugin_filter()
        if allowed is not None and not plugins.loaded:
            limit = "no_plugins" if settings.no_plugins else "allow_plugins"
            self.warn(f"no plugin is loaded: {limit} ({settings.sources[limit]}) admits none")
        self._warn_of_unknown_plugins(settings)
        return plugins

    def _warn_of_unknown_plugins(self, settings: Settings) -> None:
        """Names in the settings that no installed plugin has; they may be misspelt."""
        for setting, names in (
            ("allow_plugins", settings.allow_plugins or ()),
            ("deny_plugins", settings.deny_plugins),
        ):
            denied = setting == "deny_plugins"
            unknown = unknown_plugins(names, denied=denied) if names else {}
            for name, meant in unknown.items():
                guess = f", did you mean {meant!r}?" if meant else ""
                source = settings.sources[setting]
                self.warn(f"{setting} ({source}): no plugin comes from {name!r}{guess}")

    def detect(self, plugins: Plugins) -> Detection:
        """The devices, with a warning for each that no plugin serves and each probe that failed."""
        known = len(plugins.failures)
        early = self._early if self._early and self._early[1] is plugins else None
        detection = plugins.detect() if early is None else early[2].result()
        for failure in detection.failures[known:]:
            self.warn(str(failure))
        for device in detection.unserved:
            self.warn(str(device))
        return detection

    def measurements(self, settings: Settings) -> tuple[Measurement, ...]:
        """The measurements of this machine, with a warning for each that cannot be read."""
        file = settings.measurements_file()
        # Path.exists raises for a folder without permission
        if file is None or not os.path.exists(file):
            return ()
        # Not imported unless something was measured
        from attnmux.core.measured.measurement import Measurement  # noqa: PLC0415

        stored = Measurement.read(file)
        for problem in stored.problems:
            self.warn(problem)
        return stored.found

    def warn_of_unverified(
        self, decision: Decision, offers: Sequence[Offer], measurements: Sequence[Measurement]
    ) -> None:
        """A warning for each backend that `Unverified.by_cards` finds."""
        if next(doubtful(decision, offers), None) is None:
            return
        from attnmux.core.measured.passes import Passes  # noqa: PLC0415  # most cards prove enough

        for each in Unverified.by_cards(
            decision, offers, measurements, Passes.in_cache(Settings.cache_folder())
        ):
            self.warn(str(each))

    def launches(self, settings: Settings) -> tuple[TunedLaunch, ...]:
        """Everything that was tuned on this machine, with a warning for all that cannot be read."""
        try:
            file = settings.launches_file()
        except SettingsError as error:
            self.warn(f"launches that were tuned here are left out: {error}")
            return ()
        if file is None or not os.path.exists(file):
            return ()
        # Most machines have tuned nothing
        from attnmux.core.facts.launches import TunedLaunch  # noqa: PLC0415

        records = TunedLaunch.read(file)
        for problem in records.problems:
            self.warn(problem)
        return records.found

    def warn(self, text: str) -> None:
        """Print a warning, the same one once."""
        if text not in self.warnings:
            self.warnings.append(text)
            print(f"attnmux: warning: {text}", file=sys.stderr)

    def echo_json(self, answer: object) -> None:
        print(json.dumps(answer, indent=2), file=self.answer, flush=True)

    def report(self, error: Exception) -> int:
        """Print the error on stderr, if asked with its traceback. Returns the exit code.

        Raises an answer that cannot be written, which the caller reports.
        """
        if getattr(error, "errno", None) in UNWRITABLE:
            raise error
        if self.debug:
            import traceback  # noqa: PLC0415  # off the path without a failure

            traceback.print_exc()
        if isinstance(error, AttnmuxError):
            print(f"attnmux: {error}", file=sys.stderr)
            if isinstance(error, NoBackend):
                return NOTHING_FITS
            usage = (InvalidInput, UnknownBackend, AmbiguousPlatform, SettingsError)
            return USAGE if isinstance(error, usage) else FAILURE
        kind = type(error).__name__
        print(f"attnmux: {kind}: {error} (--debug shows where)", file=sys.stderr)
        return FAILURE


@contextmanager
def without_collections() -> Iterator[None]:
    """Collect no garbage while the block makes what stays."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def escape_unknown() -> None:
    """Write characters that the terminal's encoding lacks as escapes; a name may hold any."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


@contextmanager
def writing(path: Path, *, otherwise: str) -> Iterator[None]:
    """Turn an OSError of the block into a SettingsError that names the file and, with `otherwise`,
    what else can be done."""
    try:
        yield
    except OSError as error:
        why = error.strerror or AttnmuxError.in_brief(error)
        raise SettingsError(f"{path} cannot be written: {why}; {otherwise}") from error


class FiniteRange(click.FloatRange):
    """A range of numbers without nan, which click finds in every range, and without infinity."""

    def convert(
        self,
        value: Any,  # noqa: ANN401  # click's own signature
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> float:
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{number} is not a finite number.", param, ctx)
        return number


def _set(ctx: click.Context, option: click.Parameter, value: bool) -> None:
    """Note the option in the field of the run that has its name."""
    run = ctx.find_object(Run)
    if run is not None and value:
        setattr(run, str(option.name), True)


def _set_answer(ctx: click.Context, _: click.Parameter, value: bool) -> bool:
    run = ctx.find_object(Run)
    if run is not None and value and sys.stdout is not None:
        run.answer = sys.stdout
        ctx.with_resource(redirect_stdout(sys.stderr))
    return value


def common_options(verb: Callable[..., Any]) -> Callable[..., Any]:
    """The options of every verb, --json, --no-plugins and --debug, and its `Run` as the first
    argument."""
    command: Callable[..., Any] = click.make_pass_decorator(Run)(verb)
    for name, said in (
        ("--debug", "Show the traceback of an error."),
        ("--no-plugins", "Load no plugin."),
    ):
        command = click.option(
            name, help=said, is_flag=True, is_eager=True, expose_value=False, callback=_set
        )(command)
    return click.option(
        "--json", "as_json", is_flag=True, callback=_set_answer, help="Answer in JSON."
    )(command)
