"""The verbs: a table, how they are loaded, and the exit codes of their errors."""

from __future__ import annotations

import gc
import importlib
import signal
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import EntryPoint
from typing import Any

import click

from attnmux.core.cli.run import INTERRUPTED, TERMINATED, Run, escape_unknown
from attnmux.core.facts.checks import nearest
from attnmux.core.facts.errors import AttnmuxError, SettingsError
from attnmux.core.facts.libraries import entry_points, identity
from attnmux.core.find.plugins import is_admitted
from attnmux.core.find.settings import Settings

GROUP = "attnmux.commands"
"""Entry points of other distributions' verbs: name = "module:command"."""

VERBS: Mapping[str, tuple[str, str]] = {
    "backends": ("attnmux.core.cli.lists:backends", "List the backends of the installed plugins."),
    "doctor": ("attnmux.core.cli.doctor:doctor", "Show what works here, and how to fix the rest."),
    "explain": ("attnmux.core.cli.explain:explain", "Explain a reason code."),
    "platforms": ("attnmux.core.cli.lists:platforms", "List the devices of this machine."),
    "select": ("attnmux.core.cli.select:select", "Choose a backend for a request, and say why."),
}

OPTIONAL: Mapping[str, tuple[str, str]] = {
    "audit": ("attnmux-advisories", "List known faults of the installed kernel libraries."),
    "bench": ("attnmux-testing", "Time every backend here on the same steps."),
    "generate": ("attnmux-transformers", "Generate text with a Hugging Face model."),
    "matrix": ("attnmux-testing", "Print the support matrix of all backends."),
    "replay": ("attnmux-testing", "Run a kept failure again, on any backend."),
    "report": ("attnmux-testing", "Write a report on the backends of this machine."),
    "tune": ("attnmux-testing", "Try kernel launches here, and keep the fastest."),
    "validate": ("attnmux-testing", "Check a plugin's distribution, without a device."),
    "verify": ("attnmux-testing", "Run the conformance suite on a backend."),
    "warm": ("attnmux-transformers", "Compile ahead what generate needs."),
}
"""This project's verbs in other distributions: the distribution, and the verb's summary."""


class Terminated(KeyboardInterrupt):
    """SIGTERM, which ends a verb as Ctrl-C does, with its child processes."""


def _terminate(*_: object) -> None:
    raise Terminated


class Verbs(click.Group):
    """A group whose verbs are imported when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*VERBS, *_listed()})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in VERBS:
            module, _, attribute = VERBS[cmd_name][0].partition(":")
            command: click.Command = getattr(importlib.import_module(module), attribute)
            return command
        points = _outside().get(cmd_name)
        return None if points is None else _load(cmd_name, points)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in VERBS and name not in _outside() and not name.startswith("-"):
            raise click.UsageError(_unknown(name), ctx)
        resolved = super().resolve_command(ctx, args)
        if not gc.isenabled():
            # Imported modules stay: the first collection can skip them
            gc.freeze()
            gc.enable()
        return resolved

    def invoke(self, ctx: click.Context) -> object:
        """Raises AttnmuxError if a library ends the process: the verbs return their exit code."""
        try:
            return super().invoke(ctx)
        except SystemExit as error:
            if isinstance(error.__context__, BrokenPipeError):
                raise  # rich ends so when the reader has seen enough
            message = f"ended early by a library: SystemExit: {error.code}"
            raise AttnmuxError(message) from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """From the tables alone: help imports no verb."""
        installed = _listed()
        rows = {name: text for name, (_, text) in VERBS.items()}
        for name, points in installed.items():
            whose = " and ".join(map(_distribution, points))
            distribution, summary = OPTIONAL.get(name, ("", ""))
            rows[name] = summary if whose == distribution else f"(from {whose})"
        for name, (distribution, summary) in OPTIONAL.items():
            if name not in installed:
                # First, where no line break can fall into it
                rows[name] = f"(pip install {distribution}) {summary}"
        with formatter.section("Verbs"):
            formatter.write_dl(sorted(rows.items()))

    def main(  # type: ignore[override]  # click's overloads say only what standalone_mode returns
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,  # noqa: ANN401  # click's own signature
    ) -> object:
        """Run a verb; if standalone, end the process with the exit code."""
        run = Run()
        if standalone_mode:
            escape_unknown()
            signal.signal(signal.SIGTERM, _terminate)
        try:
            outcome: object = super().main(
                args, prog_name, complete_var, standalone_mode=False, obj=run, **extra
            )
        except Exception as error:
            if not standalone_mode:
                raise
            if isinstance(error, click.ClickException):
                error.show()
                sys.exit(error.exit_code)
            if isinstance(error, click.Abort):
                ended = isinstance(error.__cause__, Terminated)
                print(f"attnmux: {'terminated' if ended else 'interrupted'}", file=sys.stderr)
                sys.exit(TERMINATED if ended else INTERRUPTED)
            sys.exit(run.report(error))
        if not standalone_mode:
            return outcome
        sys.exit(outcome if isinstance(outcome, int) else 0)


def _outside() -> dict[str, list[EntryPoint]]:
    """Verbs of other distributions that the configuration admits. They cannot replace core's.

    An allow list needs not name this project's own verbs. Raises SettingsError for a configuration
    that cannot be read.
    """
    allow, deny = Settings.load().plugin_filter()
    points_by_name: dict[str, list[EntryPoint]] = {}
    for name, points in _installed().items():
        for point in points:
            whose = _distribution(point)
            is_owner = whose == OPTIONAL.get(name, ("",))[0]
            if is_admitted(whose, None if is_owner else allow, deny):
                points_by_name.setdefault(name, []).append(point)
    return points_by_name


def _installed() -> dict[str, list[EntryPoint]]:
    points_by_name: dict[str, list[EntryPoint]] = {}
    for point in entry_points(GROUP)[0]:
        if point.name not in VERBS:
            points_by_name.setdefault(point.name, []).append(point)
    return points_by_name


def _listed() -> dict[str, list[EntryPoint]]:
    """For help, which a damaged configuration must not keep from the user."""
    try:
        return _outside()
    except SettingsError:
        return {}


def _distribution(point: EntryPoint) -> str:
    return identity(point.dist)[0] or point.value


def _load(name: str, points: list[EntryPoint]) -> click.Command:
    whose = sorted(map(_distribution, points))
    if len(points) > 1:
        raise AttnmuxError(f"the verb {name!r} belongs to {' and '.join(whose)}: uninstall one")
    try:
        command = points[0].load()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        message = (
            f"the verb {name!r} of {whose[0]} cannot be loaded: {type(error).__name__}: {error}"
        )
        raise AttnmuxError(message) from error
    if not isinstance(command, click.Command):
        raise AttnmuxError(f"the verb {name!r} of {whose[0]} is {command!r}, not a click command")
    return command


def _unknown(name: str) -> str:
    installed = _outside()
    near = nearest(name, {*VERBS, *installed, *OPTIONAL})
    guess = f" Did you mean {near!r}?" if near not in ("", name) else ""
    if near in OPTIONAL and near not in installed:
        distribution, _ = OPTIONAL[near]
        guess += (
            f" {near!r} needs {distribution}, which is not installed: pip install {distribution}"
        )
    for point in _installed().get(name, ()):
        guess += f" That of {_distribution(point)} is left out by allow_plugins, deny_plugins or "
        guess += "no_plugins."
    return f"No such verb {name!r}.{guess}"


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="attnmux-core")
def verbs() -> None:
    """Choose an attention backend for LLM inference, see why, and call it."""
