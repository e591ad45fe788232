"""The support matrix as a terminal shows it: within its width, by backend or by feature."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from attnmux.core.verbs import plain_console, plain_table
from attnmux.testing.matrix.rows import COLUMNS, Cell, Row

LIMITED = "*"


def show(
    rows: Sequence[Row], titles: Mapping[str, str], *, by_feature: bool, in_full: bool
) -> None:
    """Print a table for each kind of attention.

    in_full: print every feature of every row with its limits, instead of one line for each row.
    """
    console = plain_console()
    if not rows:
        console.print("no installed backend serves that: attnmux select --all says why")
        return
    for number, kind in enumerate(dict.fromkeys(row.kind for row in rows)):
        if number:
            console.print()
        console.print(Text(titles.get(kind, kind), style="bold underline"))
        alike = [row for row in rows if row.kind == kind]
        if in_full:
            for row in alike:
                _print_in_full(console, row)
        elif by_feature:
            _print_by_feature(console, alike)
        else:
            _print_by_backend(console, alike)
    if not in_full and any(cell.where for row in rows for cell in row.cells):
        console.print()
        console.print(
            Text(f"{LIMITED} within limits: attnmux matrix BACKEND says which", style="dim")
        )


def _print_by_backend(console: Console, rows: Sequence[Row]) -> None:
    """Paragraphs, since the lists are too long for the columns of a narrow terminal."""
    for row in rows:
        facts = f"  {'; '.join(row.machines)}; proof: {row.proven}"
        console.print(Text.assemble((row.backend, "bold"), (facts, "dim")))
        phases = [phase for phase in row.phases if phase != "encoder"]
        console.print(Padding(Text(", ".join([*phases, *_features(row)])), (0, 0, 0, 4)))


def _print_by_feature(console: Console, rows: Sequence[Row]) -> None:
    table = plain_table("feature", "backends")
    for number, column in enumerate(COLUMNS):
        serving = [_marked(row.backend, row.cells[number]) for row in rows]
        table.add_row(column.title, ", ".join(filter(None, serving)) or Text("none", style="dim"))
    console.print(table)


def _print_in_full(console: Console, row: Row) -> None:
    console.print(Text(f"{row.backend} ({row.plugin})", style="bold"))
    table = plain_table("", "")
    table.show_header = False
    for name, value in (
        ("machines", "; ".join(row.machines)),
        ("phases", ", ".join(row.phases)),
        ("page sizes", row.page_sizes),
        ("proof", str(row.proven)),
    ):
        table.add_row(name, value)
    for column, cell in row.features():
        source = row.sources.get(column.axis.name, "")
        said = "no" if cell.served == "no" else cell.where or "yes"
        table.add_row(column.title, f"{said} [{source}]" if source else said)
    console.print(table)


def _features(row: Row) -> list[str]:
    return list(filter(None, (_marked(column.title, cell) for column, cell in row.features())))


def _marked(name: str, cell: Cell) -> str:
    """The name with a mark where limits apply; empty where the feature is not served."""
    if cell.served == "no":
        return ""
    return f"{name}{LIMITED}" if cell.where else name
