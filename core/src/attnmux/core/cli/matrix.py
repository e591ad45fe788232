"""`attnmux matrix`: the support matrix, read from the cards alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict

import click

from attnmux.core.choosing.ask.values import KINDS
from attnmux.core.choosing.offer.verified import hardware
from attnmux.core.cli.matrix_rows import COLUMNS, Cell, Row, rows_of
from attnmux.core.cli.run import Run, common_options, echo_json, pass_run

INTRODUCTION = """\
# Support matrix

What each backend serves, as its card says. `attnmux matrix` prints this page; cards of other
installed plugins are in it too. Empty cells are not served. A number leads to the limits under
which a cell holds. A planned backend can be asked about for any machine and does not run yet.
"Run on" is the hardware on which a backend passed the conformance suite; "an emulator alone" is
none of it: the vendor's functions in plain torch.

Not implemented here, though other engines list it: 4-bit KV (triton, trtllm_mha, fa4 and
flashinfer_mla on NVIDIA), since no pool stores it; chunked prefixes with a cache of their own
(fa3, flashinfer_mla, flashmla, cutlass_mla and trtllm_mla over MLA)."""

TITLES = {
    "mha": "MHA and GQA",
    "mla": "MLA",
    "nsa": "Sparse MLA (NSA)",
    "dual_chunk": "Dual chunk attention",
    "linear": "Linear attention",
}

LEADING = ("backend", "plugin", "status", "machines", "phases", "page sizes", "run on")


@click.command()
@common_options
@pass_run
def matrix(run: Run, as_json: bool) -> None:
    """Print what each backend of the installed plugins serves, as Markdown."""
    plugins = run.plugins(run.settings())
    rows = rows_of(plugins.offers())
    if as_json:
        echo_json(
            {
                "rows": [row.to_dict() for row in rows],
                "failures": [asdict(failure) for failure in plugins.failures],
                "warnings": run.warnings,
            }
        )
        return
    click.echo(markdown(rows))


def markdown(rows: Sequence[Row]) -> str:
    """A page with a table for each kind of attention, and its numbered limits below."""
    sections = [
        _section(TITLES.get(kind, kind), [row for row in rows if row.kind == kind])
        for kind in KINDS
        if any(row.kind == kind for row in rows)
    ]
    return "\n\n".join([INTRODUCTION, *sections])


def _section(title: str, rows: Sequence[Row]) -> str:
    notes: dict[str, int] = {}
    header = (*LEADING, *(column.title for column in COLUMNS))
    lines = [_line(header), _line("---" for _ in header)]
    for row in rows:
        leading = (
            f"`{row.backend}`",
            row.plugin,
            row.status,
            "; ".join(row.machines),
            ", ".join(row.phases),
            row.page_sizes,
            hardware(row.verified_on),
        )
        lines.append(_line((*leading, *(_said(cell, notes) for cell in row.cells))))
    limits = [f"{number}. {text}" for text, number in notes.items()]
    blocks = (f"## {title}", "\n".join(lines), "\n".join(limits), "\n".join(_pairs(rows)))
    return "\n\n".join(filter(None, blocks))


def _pairs(rows: Sequence[Row]) -> list[str]:
    """Rules about two backends, which no cell of one can hold."""
    apart = dict.fromkeys(
        tuple(sorted((row.backend, other))) for row in rows for other in row.excludes
    )
    said = [
        f"- `{one}` and `{other}` never share a KV cache, one for extend and one for decode."
        for one, other in apart
    ]
    for row in rows:
        if row.companions:
            names = " or ".join(f"`{name}`" for name in row.companions)
            missing = "extend" if "extend" not in row.phases else "decode"
            said.append(f"- Where `{row.backend}` alone is named, {names} serves {missing}.")
    return said


def _said(cell: Cell, notes: dict[str, int]) -> str:
    """ "yes", "yes (2)" with the number of a note, or ""."""
    if cell.served == "no":
        return ""
    if not cell.where:
        return "yes"
    return f"yes ({notes.setdefault(cell.where, len(notes) + 1)})"


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
