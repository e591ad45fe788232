"""Shared by the verbs: the invocation, and the options of all."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import Any, TypeVar

import click

from attnmux.core.cli.invocation import JSON
from attnmux.core.cli.invocation import Run as Run
from attnmux.core.cli.invocation import writing as writing

F = TypeVar("F", bound=Callable[..., Any])

pass_run = click.make_pass_decorator(Run)


def _set(ctx: click.Context, option: click.Parameter, value: bool | str | None) -> None:
    """Note the option in the field of the run that has its name."""
    run = ctx.find_object(Run)
    if run is not None and value:
        setattr(run, str(option.name), value)


def _set_answer(ctx: click.Context, _: click.Parameter, value: bool) -> bool:
    run = ctx.find_object(Run)
    if run is not None and value and sys.stdout is not None:
        run.answer = sys.stdout
        ctx.with_resource(redirect_stdout(sys.stderr))
    return value


def common_options(command: F) -> F:
    """The options of every verb: --json, --no-plugins, --locked and --debug."""
    locked = "Refuse what differs from this file of `attnmux lock`."
    for name, said, given in (
        ("--debug", "Show the traceback of an error.", {"is_flag": True, "is_eager": True}),
        ("--no-plugins", "Load no plugin.", {"is_flag": True}),
        ("--locked", locked, {"metavar": "FILE"}),
    ):
        command = click.option(name, help=said, expose_value=False, callback=_set, **given)(command)
    return click.option(
        JSON, "as_json", is_flag=True, callback=_set_answer, help="Answer in JSON."
    )(command)


def echo_json(answer: object) -> None:
    run = click.get_current_context().find_object(Run)
    (run or Run()).echo_json(answer)
