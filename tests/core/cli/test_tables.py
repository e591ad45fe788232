"""Tables fit their terminal."""

from __future__ import annotations

import io

from rich.console import Console

from attnmux.core.cli.tables import print_rows

COLUMNS = ("device", "count", "runtime", "features")
ROWS = [("cpu:x86_64", "1", "", "avx2 avx512"), ("cpu:aarch64", "12", "", "sve")]


def told(width, rows=ROWS) -> str:
    out = io.StringIO()
    print_rows(Console(file=out, width=width, highlight=False, markup=False), COLUMNS, rows)
    return out.getvalue()


def test_a_column_without_cells_is_left_out() -> None:
    assert told(80).splitlines()[0].split() == ["device", "count", "features"]
    assert told(80, []).split() == list(COLUMNS)


def test_numbers_of_a_paragraph_are_named() -> None:
    assert told(25).splitlines()[:2] == ["cpu:x86_64 count 1", "  avx2 avx512".ljust(25)]


def test_the_last_column_is_as_wide_as_its_longest_line() -> None:
    rows = [("cpu", "1", "", "torch 2.14.1\nvllm-cpu: missing")]
    assert told(32, rows).splitlines()[1].split() == ["cpu", "1", "torch", "2.14.1"]
