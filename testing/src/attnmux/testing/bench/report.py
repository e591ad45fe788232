"""Tables of figures for people and files, and the facts that the figures belong to."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table

from attnmux.core.plugin import Files

Cell = str | float | None


def facts(device: torch.device, *distributions: str, **more: object) -> dict[str, Any]:
    """The machine, the device, the command and the versions that figures belong to.

    distributions: packages whose versions matter, besides Python and torch.
    """
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for name in distributions:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    name = _processor()
    if device.type == "cuda":
        name = f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}"
    elif device.type == "cpu":
        capability = torch.backends.cpu.get_cpu_capability()
        name = f"{name}, {capability}, {torch.get_num_threads()} threads"
    return {
        "command": " ".join(["python", *sys.argv]),
        "machine": platform.platform(),
        "device": name,
        "versions": versions,
        **more,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


class Report:
    """A Markdown table that grows row by row, and a JSON file that each row rewrites.

    Use as a context manager. Rows appear at once, so that nothing is lost by a time limit.
    """

    def __init__(
        self,
        columns: Mapping[str, str],
        about: Mapping[str, Any],
        path: Path | None = None,
        *,
        title: str = "",
    ) -> None:
        """columns: a format for the numbers of each, as in {"us": ".1f"}, by heading.
        about: `facts`. title: what all figures have in common. Raises InvalidInput for a `path`
        that is no regular file."""
        if path is not None:
            Files.check_replaceable("--json", path)
        self.rows: list[Mapping[str, Any]] = []
        self._columns, self._about, self._path = columns, about, path
        # Text is literal: no markup, no colours for numbers
        self._console = Console(highlight=False, markup=False, emoji=False)
        versions = ", ".join(f"{name} {found}" for name, found in about["versions"].items())
        self.note(f"{about['device']}; {versions}; {about['machine']}")
        self.note(f"{title}\n")
        self._table = Table(box=box.MARKDOWN)
        for heading, spec in columns.items():
            self._table.add_column(heading, justify="right" if spec else "left", overflow="fold")
        self._live: Live | None = None

    def __enter__(self) -> Report:
        if self._console.is_terminal:
            self._live = Live(self._table, console=self._console, auto_refresh=False)
            self._live.start()
        else:
            self._print_row(list(self._columns))
            self._print_row(["--:" if spec else "---" for spec in self._columns.values()])
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def add(
        self, *cells: Cell, record: Mapping[str, Any] | None = None, missed: bool = False
    ) -> None:
        """Add a row. None is shown as "-".

        record: the row in the file; by default, the cells by heading. missed: the row misses its
        bar, and is shown in red.
        """
        shown = [
            _shown(cell, spec) for cell, spec in zip(cells, self._columns.values(), strict=True)
        ]
        if self._live is None:
            self._print_row(shown)
        else:
            self._table.add_row(*shown, style="red" if missed else None)
            self._live.refresh()
        self.rows.append(record or dict(zip(self._columns, cells, strict=True)))
        self.save()

    def _print_row(self, cells: Sequence[str]) -> None:
        self._console.print(f"| {' | '.join(cells)} |", soft_wrap=True)

    def save(self, **more: object) -> None:
        """Write the file now, with `more` besides the facts and the rows."""
        if self._path is not None:
            data = {**self._about, "rows": self.rows, **more}
            self._path.write_text(json.dumps(data, indent=1), encoding="utf-8")

    def note(self, text: str) -> None:
        """Print a line; above the table on a terminal."""
        self._console.print(text, soft_wrap=True)


def _shown(cell: Cell, spec: str) -> str:
    if cell is None:
        return "-"
    return cell if isinstance(cell, str) else format(cell, spec)
