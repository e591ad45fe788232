"""`attnmux matrix`: the support matrix, read from the cards alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict

import click

from attnmux.core import Platform, Request
from attnmux.core.plugin import Verified
from attnmux.core.verbs import Proven, Run, common_options, machine, offers_named
from attnmux.testing.matrix.rows import COLUMNS, Cell, Row, narrowed, rows_of

INTRODUCTION = """\
# Support matrix

What each backend serves, as its card says. `attnmux matrix --markdown` prints this page; cards of
other installed plugins are in it too. Empty cells are not served. A number leads to the limits
under which a cell holds.
"Proof" is the strongest run of the conformance suite that the backend passed, and its last day. In
order: "hardware", a device that the row is for; "compiled", no run: the kernels compile for such a
device; "other device", where the same kernels ran; "interpreted", the library's kernels without a
device; "emulated", a stand-in of the library in plain torch, which proves nothing about the
hardware; "nothing". [Runs](#runs) lists all of them.

Not implemented here, though other engines list it: 4-bit KV of trtllm_mha, fa4 and
flashinfer_mla."""

RUNS = """\
The runs on the cards (`verified_on`), by day. "Cases" counts those that agreed eagerly and from
graphs, where the run was counted; further runs, with their commands, are in
[conformance.md](../benchmarks/results/conformance.md), and how much compiled in
[chips.md](../benchmarks/results/chips.md)."""

TITLES = {
    "mha": "MHA and GQA",
    "mla": "MLA",
    "nsa": "Sparse MLA (NSA)",
    "dual_chunk": "Dual chunk attention",
    "gdn": "Gated delta rule",
    "kda": "Kimi delta attention",
    "mamba1": "Mamba",
    "mamba2": "Mamba-2",
    "lightning": "Lightning attention",
    "conv": "Short convolution",
}

LEADING = ("backend", "plugin", "machines", "phases", "page sizes", "proof")


@click.command()
@click.argument("backends", nargs=-1, metavar="[BACKEND]...")
@click.option(
    "--platform",
    help=f"Only what serves a machine: {Platform.GRAMMAR}, or a vendor on this machine.",
)
@click.option(
    "--request",
    "fields",
    multiple=True,
    help="Only what serves a request: FIELD=VALUE,…; repeatable.",
)
@click.option(
    "--by",
    type=click.Choice(["backend", "feature"]),
    default="backend",
    show_default=True,
    help="A line for each backend, or for each feature.",
)
@click.option("--markdown", "as_markdown", is_flag=True, help="One wide table, as Markdown.")
@common_options
def matrix(
    run: Run,
    as_json: bool,
    backends: tuple[str, ...],
    platform: str | None,
    fields: tuple[str, ...],
    by: str,
    as_markdown: bool,
) -> None:
    """Show what the backends of the installed plugins serve; with names, every limit of those."""
    settings = run.settings()
    plugins = run.plugins(settings)
    offers = plugins.offers()
    asked = [offer.address for name in backends for offer in offers_named(name, offers)]
    named = [offer for offer in offers if not backends or offer.address in asked]
    device = None if platform is None else machine(run, settings, plugins, platform)
    request = Request.parse(*fields) if any(fields) else None
    rows = rows_of(narrowed(named, request, device), device)
    if as_json:
        run.echo_json(
            {
                "rows": [row.to_dict() for row in rows],
                "failures": [asdict(failure) for failure in plugins.failures],
                "warnings": run.warnings,
            }
        )
    elif as_markdown:
        click.echo(markdown(rows))
    else:
        from attnmux.testing.matrix.view import show  # noqa: PLC0415  # rich is slow to import

        show(rows, TITLES, by_feature=by == "feature", in_full=bool(backends))


def markdown(rows: Sequence[Row]) -> str:
    """A page with a table for each kind of attention, and its numbered limits below."""
    sections = [
        _section(TITLES.get(kind, kind), [row for row in rows if row.kind == kind])
        for kind in Request.KINDS
        if any(row.kind == kind for row in rows)
    ]
    return "\n\n".join([INTRODUCTION, *sections, _runs(rows)])


def _runs(rows: Sequence[Row]) -> str:
    """Every run of every backend, with the most that it proves in a kind of attention."""
    header = ("backend", "proof", "ran on", "libraries", "cases that agreed", "date")
    found: dict[tuple[str, str], list[tuple[str, Verified]]] = {}
    for row in rows:
        found.setdefault((row.backend, row.plugin), []).extend(row.proven.runs)
    lines = [_line(header), _line("---" for _ in header)]
    for (backend, _), runs in sorted(found.items()):
        strongest: dict[Verified, str] = {}
        for word, run in sorted(runs, key=lambda each: Proven.WORDS.index(each[0])):
            strongest.setdefault(run, word)
        for run, word in strongest.items():
            cases = str(run.cases or "")
            where = (str(run), ", ".join(run.libraries), cases, run.date)
            lines.append(_line((f"`{backend}`", word, *where)))
        if not runs:
            lines.append(_line((f"`{backend}`", "nothing", "", "", "", "")))
    return "\n\n".join(("## Runs", RUNS, "\n".join(lines)))


def _section(title: str, rows: Sequence[Row]) -> str:
    notes: dict[str, int] = {}
    header = (*LEADING, *(column.title for column in COLUMNS))
    lines = [_line(header), _line("---" for _ in header)]
    for row in rows:
        leading = (
            f"`{row.backend}`",
            row.plugin,
            "; ".join(row.machines),
            ", ".join(row.phases),
            row.page_sizes,
            str(row.proven),
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
