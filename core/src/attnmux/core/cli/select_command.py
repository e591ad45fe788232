"""`attnmux select` for click."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from attnmux.core.cli import select as answering
from attnmux.core.cli.run import Run, common_options, pass_run
from attnmux.core.cli.select_options import OPTIONS, Option


def _declared(option: Option, command: Callable[..., None]) -> Callable[..., None]:
    given: dict[str, Any] = {
        name: value
        for name in ("is_flag", "multiple", "default", "metavar")
        if (value := getattr(option, name)) not in (None, False)
    }
    if option.least is not None:
        given["type"] = click.IntRange(min=option.least)
    elif option.words:
        given["type"] = click.Choice(option.words)
    return click.option(option.said, option.argument, help=option.help, **given)(command)


def _select(run: Run, /, **given: Any) -> None:  # noqa: ANN401  # the options' values
    answering.select(run, **given)


_select.__doc__ = answering.select.__doc__
_command = common_options(pass_run(_select))
for _option in reversed(OPTIONS):
    _command = _declared(_option, _command)
select = click.command("select")(_command)
