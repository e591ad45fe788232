"""Progress and result of `attnmux verify` for people; `--json` never imports it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console
from rich.progress import track as rich_track
from rich.table import Table
from rich.text import Text

from attnmux.testing.candidate import Candidate
from attnmux.testing.outcome import Outcome


def track(trials: Iterable[Outcome], total: int, candidate: Candidate) -> Iterator[Outcome]:
    """The trials, with a progress bar on stderr where that is a terminal."""
    console = Console(stderr=True)
    yield from rich_track(
        trials,
        total=total,
        description=f"{candidate.card.name} on {candidate.device}",
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def report(candidate: Candidate, outcomes: Sequence[Outcome], limits: Sequence[Outcome]) -> None:
    """What failed and where, what was refused and why, and how much was really run."""
    console = Console(highlight=False)
    failed = [outcome for outcome in (*outcomes, *limits) if outcome.status == "failed"]
    if failed:
        console.print(_failures(failed))
    refused = [outcome for outcome in outcomes if outcome.status == "refused"]
    if refused:
        console.print(_refusals(refused))
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
    """How many of the cases agree, by how they were run."""
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
    """Cases by the first reason against them: most of them share a few."""
    counts = Counter(str(outcome.reasons[0]) for outcome in refused)
    table = Table("cases", "reason", title="refused by the card", box=None)
    for reason, count in counts.most_common():
        table.add_row(str(count), Text(reason))
    return table
