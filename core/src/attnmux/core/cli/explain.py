"""`attnmux explain`: the meaning of each reason code, and its remedy."""

from __future__ import annotations

from collections.abc import Mapping

import click

from attnmux.core.cli.completion import completing
from attnmux.core.cli.run import Run, common_options
from attnmux.core.facts.axes import AXES
from attnmux.core.facts.axis import Axis
from attnmux.core.facts.checks import nearest
from attnmux.core.facts.errors import InvalidInput

MEANINGS: Mapping[str, str] = {
    "ADVISORY": "The installed release of a library that it uses gives wrong numbers, faults or "
    "hangs for this request. The reason names the finding and its source; attnmux audit lists all.",
    "CONTRACT": "Its card is written for another version of the contract. Update its plugin or "
    "attnmux-core.",
    "DENIED": "The configuration leaves it out: allow_backends, deny_backends or the lists of "
    "plugins. attnmux select --all shows the origin of each value.",
    "EXCLUDED": "It must not share a KV cache with the backend of the other phase. Name one of the "
    "two for both phases.",
    "FAILED": "It was tried on this machine, and its library did not load or its kernels did not "
    "compile. The reason has the library's own message.",
    "LIBRARY": "A library that it needs is missing, or has another version. The hint is the line "
    "that installs it.",
    "MAX_ERROR": "Neither a measurement nor its card proves that its error stays below max_error. "
    "Measure it: attnmux bench --keep.",
    "NO_CLAUSE": "Its card has no clause, so that it serves nothing.",
    "NO_COMMON_POINT": "It fits by itself, but no page size and KV dtype suit it and a backend for "
    "every other phase. Name backends that share them, or one backend for all phases.",
    "PHASES_TOGETHER": "It serves some of the phases that one backend must serve together, but not "
    "all of them.",
}
"""The codes that do not name an axis."""


def meanings() -> dict[str, str]:
    """Every code with its explanation, sorted."""
    axes = {axis.name.upper(): f"{axis.meaning} {_advice(axis)}" for axis in AXES}
    return dict(sorted({**MEANINGS, **axes}.items()))


def _advice(axis: Axis) -> str:
    name = axis.name
    if axis.settable and axis.droppable:
        return f"Change {name} in --request, or let --allow-coercion drop it."
    if axis.settable:
        return f"Change {name} in --request, or choose another backend."
    return "The model or the machine sets this: choose another backend."


CODES = completing(meanings)


@click.command()
@click.argument(
    "codes", nargs=-1, metavar="[CODE]...", shell_complete=completing(lambda: meanings())
)
@common_options
def explain(run: Run, as_json: bool, codes: tuple[str, ...]) -> None:
    """Explain the codes of `select --json`, and what helps. Without CODE, explain all of them."""
    known = meanings()
    for code in codes:
        if code.upper() not in known:
            near = nearest(code.upper(), known)
            guess = f"a reason code, such as {near}" if near else "a reason code"
            expected = f"{guess} (attnmux explain lists them)"
            raise InvalidInput("CODE", got=repr(code), expected=expected)
    chosen = {code.upper(): known[code.upper()] for code in codes} or known
    if as_json:
        run.echo_json(chosen)
        return
    from attnmux.core.cli.render import render_codes  # noqa: PLC0415  # rich is slow to import

    render_codes(chosen)
