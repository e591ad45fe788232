"""The output of `attnmux verify` for its outcomes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from statistics import median

from rich.table import Table
from rich.text import Text

from attnmux.core.verbs import plain_console
from attnmux.testing.run.candidate import Candidate, Outcome, StepFigures


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


def report(candidate: Candidate, outcomes: Sequence[Outcome], limits: Sequence[Outcome]) -> None:
    """Print failures, refusals by reason, errors by length, and the number of cases that ran."""
    console = plain_console()
    failed = [outcome for outcome in (*outcomes, *limits) if outcome.status == "failed"]
    if failed:
        console.print(_failures(failed))
    refused = [outcome for outcome in outcomes if outcome.status == "refused"]
    if refused:
        console.print(_refusals(refused))
    steps = [step for outcome in outcomes for step in outcome.steps]
    if steps:
        console.print(by_length(steps))
    ran = [outcome for outcome in outcomes if outcome.status != "refused"]
    counts = "no case was run"
    if ran:
        largest = max(outcome.max_error for outcome in ran)
        agree = " and ".join(_counts(ran))
        counts = f"{agree} with the reference (largest error {largest:.2g})"
    where = candidate.platform.name or str(candidate.platform)
    console.print(
        Text(
            f"{candidate.card.name} on {where} ({candidate.device}): {counts}, "
            f"{len(refused)} refused by the card; "
            f"{sum(limit.status == 'refused' for limit in limits)} of {len(limits)} points beyond "
            "its limits refused",
            style="red" if failed or not ran else "green",
        )
    )


def _counts(ran: Sequence[Outcome]) -> Iterator[str]:
    """The number of cases that agree, by execution."""
    for execution, words in (("eager", "cases agree"), ("graph", "cases in graphs agree")):
        statuses = [outcome.status for outcome in ran if outcome.execution == execution]
        if statuses:
            yield f"{statuses.count('passed')} of {len(statuses)} {words}"


def _failures(failed: Sequence[Outcome]) -> Table:
    table = Table("case", "what went wrong", title="failed", title_style="red", box=None)
    for outcome in failed:
        table.add_row(Text(outcome.case), Text(outcome.message))
    return table


def _refusals(refused: Sequence[Outcome]) -> Table:
    """Refused cases by their first reason, since most share a few."""
    counts = Counter(str(outcome.reasons[0]) for outcome in refused)
    table = Table("cases", "reason", title="refused by the card", box=None)
    for reason, count in counts.most_common():
        table.add_row(str(count), Text(reason))
    return table
