"""`attnmux explain`: the meaning of a reason code."""

from __future__ import annotations

import click

from attnmux.core.choosing.common.checks import nearest
from attnmux.core.cli.codes import meanings
from attnmux.core.cli.run import Run, common_options, echo_json, pass_run
from attnmux.core.errors import InvalidInput


@click.command()
@click.argument("codes", nargs=-1, metavar="[CODE]...")
@common_options
@pass_run
def explain(_: Run, as_json: bool, codes: tuple[str, ...]) -> None:
    """Say what the codes of `select --json` mean, and what helps. Without codes, say it of all."""
    known = meanings()
    for code in codes:
        if code.upper() not in known:
            near = nearest(code.upper(), known)
            guess = f"a reason code, such as {near}" if near else "a reason code"
            expected = f"{guess} (attnmux explain lists them)"
            raise InvalidInput("CODE", got=repr(code), expected=expected)
    asked = {code.upper(): known[code.upper()] for code in codes} or known
    if as_json:
        echo_json(asked)
        return
    from attnmux.core.cli.render import render_codes  # noqa: PLC0415  # rich is slow to import

    render_codes(asked)
