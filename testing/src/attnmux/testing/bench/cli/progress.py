"""The progress bar of `attnmux bench` and `attnmux tune`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column

T = TypeVar("T")


class Bar:
    """A bar on stderr that names what runs now; nothing where stderr is no terminal.

    It is drawn when something new begins, and never by a thread that timing would notice.
    """

    def __init__(self, *, hidden: bool = False) -> None:
        console = Console(stderr=True)
        self._bar = Progress(
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn(
                "{task.description}",
                markup=False,
                table_column=Column(no_wrap=True, overflow="ellipsis"),
            ),
            console=console,
            transient=True,
            auto_refresh=False,
            disable=hidden or not console.is_terminal,
        )

    def track(self, items: Iterable[T], what: str, total: int | None = None) -> Iterator[T]:
        """Yield the items with a bar, from `what` on until `say` names something else."""
        with self._bar:
            task = self._bar.add_task(what, total=total)
            self._bar.refresh()
            for item in items:
                self._bar.advance(task)
                yield item
            self._bar.remove_task(task)

    def say(self, what: str) -> None:
        """Name what begins now."""
        for task in self._bar.task_ids:
            self._bar.update(task, description=what, refresh=True)
