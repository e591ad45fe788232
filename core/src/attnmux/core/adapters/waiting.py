"""Shows how long something takes that a user waits for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def elapsed_shown(what: str) -> Iterator[None]:
    """Show on stderr what the block does, and for how long so far, if it is a terminal."""
    # Kernels that are there already are loaded without it
    from rich.console import Console  # noqa: PLC0415  # slow to import
    from rich.progress import (  # noqa: PLC0415
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
    )

    console = Console(stderr=True)
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    shown = console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=not shown) as progress:
        progress.add_task(what, total=None)
        yield
