"""The table of `attnmux verify` with time and error by length."""

from __future__ import annotations

import math
from collections.abc import Iterable
from statistics import median

from rich.table import Table

from attnmux.testing.run.candidate import StepFigures


def by_length(steps: Iterable[StepFigures]) -> Table:
    """A row for each power of 4 that bounds the keys: median time, largest errors of each dtype.

    Errors are in roundings of the output's format, as `attnmux.testing.Errors`.
    """
    rows: dict[int, list[StepFigures]] = {}
    for step in steps:
        rows.setdefault(_bound(step.keys), []).append(step)
    dtypes = sorted({step.dtype for found in rows.values() for step in found})
    titles = [f"{dtype}, rms (worst)" for dtype in dtypes]
    table = Table("keys", "steps", "ms a step", *titles, title="error in roundings", box=None)
    for column in table.columns:
        column.justify = "right"
    for most, found in sorted(rows.items()):
        cells = [_errors([step for step in found if step.dtype == dtype]) for dtype in dtypes]
        time = median(step.ms for step in found)
        table.add_row(f"up to {most}", str(len(found)), f"{time:.2f}", *cells)
    return table


def _bound(keys: int) -> int:
    """The smallest power of 4, from 16 on, that is not less."""
    return int(4 ** max(2, math.ceil(math.log(max(keys, 1), 4) - 1e-9)))


def _errors(steps: list[StepFigures]) -> str:
    if not steps:
        return ""
    return f"{max(step.rms for step in steps):.2g} ({max(step.worst for step in steps):.2g})"
