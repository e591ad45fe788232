"""Progress and result of `attnmux tune` for people."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from rich.console import Console
from rich.progress import track as rich_track
from rich.table import Table
from rich.text import Text

from attnmux.core.choosing.machine.platform import Platform
from attnmux.core.choosing.measured.launches import Trial, Value, by_subject, winner
from attnmux.core.cli.render import WIDTH, plain_table


def track(trials: Iterable[Trial], name: str) -> Iterator[Trial]:
    """The trials, counted on stderr where that is a terminal."""
    console = Console(stderr=True)
    yield from rich_track(
        trials,
        description=f"{name} tries",
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def report(name: str, platform: Platform, trials: Sequence[Trial]) -> None:
    """What a backend tried, the fastest first."""
    console = Console(highlight=False)
    if not console.is_terminal:  # a pipe has no width of its own
        console = Console(highlight=False, width=WIDTH)
    for subject, tried in by_subject(trials).items():
        console.print(Text(f"{name} on {platform.name or platform}: {said(subject)}"))
        console.print(_table(tried))


def _table(trials: Sequence[Trial]) -> Table:
    table = plain_table("launch", "us", "of today's", "")
    table.columns[1].justify = table.columns[2].justify = "right"
    today = [trial.median_us for trial in trials if trial.is_current and trial.median_us]
    best = winner(trials)
    never = float("inf")
    for trial in sorted(trials, key=lambda trial: trial.median_us or never):
        time, share = "", ""
        if trial.median_us is not None:
            time = f"{trial.median_us:.1f}"
            share = f"{trial.median_us / today[0]:.3f}" if today else ""
        word = "won" if trial is best else "today's" if trial.is_current else ""
        note = ": ".join(filter(None, (word, trial.error)))
        table.add_row(Text(said(trial.values)), time, share, Text(note))
    return table


def said(values: Mapping[str, Value]) -> str:
    return " ".join(f"{name}={value}" for name, value in values.items())
