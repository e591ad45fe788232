"""Tables for people, as wide as the terminal. In a pipe, a row is one line.

Verbs import this module only to print, since rich is slow to import.
"""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Sequence
from typing import IO, cast

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

UNWRAPPED = 100_000
"""The width of output that is no terminal."""
LIST_WIDTH = 21
"""Width of a column that lists phases; longer lists wrap in a terminal."""
PROSE_WIDTH = 24
"""Width below which a column of sentences is unreadable."""
GAP = 2
"""Between the columns of a table."""
CHOSEN, REFUSED, UNPROVEN, BROKEN = "bold green", "dim", "yellow", "red"
"""Styles by meaning. rich drops them in a pipe and if `NO_COLOR` is set."""

Cells = Sequence["str | Text"]


def plain_console() -> Console:
    """A console without markup, as wide as the terminal. A pipe gets whole lines."""
    # As markup, the extra of "pip install 'attnmux-cpu[torch]'" would be a style and vanish
    console = Console(highlight=False, markup=False, emoji=False)
    if console.is_terminal:
        return console
    stream = cast("IO[str]", _Unpadded(sys.stdout))
    return Console(highlight=False, markup=False, emoji=False, width=UNWRAPPED, file=stream)


class _Unpadded(io.TextIOBase):
    """A stream without the spaces that fill the last column of a table."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(re.sub(r" +$", "", text, flags=re.MULTILINE))
        return len(text)

    def flush(self) -> None:
        self._stream.flush()


def plain_table(*columns: str) -> Table:
    """Columns without lines between them."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def proof_cell(proof: str) -> Text:
    """A proof, marked unless it is of hardware."""
    return Text(proof, style="" if proof in ("", "hardware") else UNPROVEN)


def print_rows(
    console: Console, columns: Sequence[str], rows: Sequence[Cells], styles: Sequence[str] = ()
) -> None:
    """A table whose last column is prose, or paragraphs if the prose column would be too narrow.

    Text wraps between words. Empty columns are left out. styles: of the rows.
    """
    styles = styles or [""] * len(rows)
    filled = [
        number
        for number, name in enumerate(columns)
        if not (name and rows) or any(row[number] for row in rows)
    ]
    names = [columns[number] for number in filled]
    cells = [[_text(row[number]) for number in filled] for row in rows]
    *widths, longest = [max(map(_width, column)) for column in zip(names, *cells, strict=True)]
    if console.width < UNWRAPPED:
        words = [len(word) for row in cells for word in row[0].plain.split()]
        widths[0] = max(min(widths[0], LIST_WIDTH), len(names[0]), *words, 0)
        room = console.width - sum(widths) - GAP * len(widths)
        if room < min(PROSE_WIDTH, longest):
            _print_paragraphs(console, names, cells, styles)
            return
    table = plain_table()
    for name, width in zip(names, widths, strict=False):
        table.add_column(name, width=width)
    table.add_column(names[-1], overflow="fold")
    for row, style in zip(cells, styles, strict=True):
        table.add_row(*row, style=style)
    console.print(table)


def _text(cell: str | Text) -> Text:
    return cell if isinstance(cell, Text) else Text(cell)


def _width(cell: str | Text) -> int:
    return max(map(len, str(cell).splitlines()), default=0)


def _print_paragraphs(
    console: Console,
    names: Sequence[str],
    rows: Sequence[Sequence[Text]],
    styles: Sequence[str],
) -> None:
    """The name of a column stands before its numbers."""
    for row, style in zip(rows, styles, strict=True):
        head = [
            Text.assemble(f"{name} ", cell) if cell.plain.isdigit() else cell
            for name, cell in zip(names[:-1], row[:-1], strict=True)
        ]
        console.print(Text(" ").join(filter(None, head)), style=style)
        if row[-1]:
            console.print(Padding(row[-1], (0, 0, 0, 2)), style=style)


def print_elsewhere(console: Console, names: Sequence[str], option: str) -> None:
    """A line with the backends that need other hardware. option: the option that shows them in
    full."""
    if names:
        console.print()
        console.print(Text(f"for other hardware ({option}): {', '.join(names)}", style=REFUSED))
