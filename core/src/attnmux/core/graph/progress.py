"""A progress bar for captures, which take seconds to minutes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.progress import Progress


def show_progress(batch_sizes: Sequence[int]) -> Iterator[int]:
    """The sizes, with a bar on stderr where that is a terminal."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("capturing graphs", total=len(batch_sizes))
        for size in batch_sizes:
            bar.update(task, description=f"capturing graphs, batch size {size}")
            yield size
            bar.advance(task)
