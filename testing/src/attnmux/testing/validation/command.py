"""`attnmux validate`: the checks of a plugin's distribution, for its author and for CI."""

from __future__ import annotations

from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, distribution

import click

from attnmux.core import InvalidInput
from attnmux.core.verbs import Run, common_options, plain_console, plain_table
from attnmux.testing.validation.checks import PROBLEM, as_requirement, validate

PROBLEMS = 1


@click.command("validate")
@click.argument("name", metavar="DIST")
@common_options
def validation(run: Run, as_json: bool, name: str) -> int:
    """Check an installed plugin: name, entry point, bounds, contract, cards, figures, advisories.

    Needs no device and no kernel library. Exits with 0 when nothing is wrong, 1 for a problem.
    Advice is not a problem.
    """
    try:
        found = validate(distribution(as_requirement(name)))
    except PackageNotFoundError:
        expected = "an installed distribution (pip install it first)"
        raise InvalidInput("DIST", got=name, expected=expected) from None
    if as_json:
        run.echo_json({"checks": [asdict(each) for each in found], "warnings": run.warnings})
    else:
        table = plain_table("check", "verdict", "what")
        for each in found:
            table.add_row(each.check, each.verdict, each.text)
        plain_console().print(table)
    return PROBLEMS if any(each.verdict == PROBLEM for each in found) else 0
