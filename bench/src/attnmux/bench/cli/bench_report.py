"""Progress and result of `attnmux bench` for people; `--json` never imports it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from rich.console import Console
from rich.progress import track as rich_track
from rich.table import Table
from rich.text import Text

from attnmux.bench.cli.bench_keep import Kept
from attnmux.bench.cli.bench_timing import Result
from attnmux.bench.conformance import Check
from attnmux.bench.measuring import Row
from attnmux.bench.subjects import Refused
from attnmux.bench.workload import Workload
from attnmux.core.choosing.ask.request import Request

WIDTH = 100

T = TypeVar("T")


def track(coming: Iterable[T], total: int, what: str) -> Iterator[T]:
    """What comes, with a progress bar on stderr where that is a terminal."""
    console = Console(stderr=True)
    yield from rich_track(
        coming,
        total=total,
        description=what,
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def report(result: Result, kept: Kept | None) -> None:
    """A table for each workload, the fastest first, who was not timed and why, and what the
    figures change where they are kept."""
    console, reached = _console(), result.ceilings
    console.print(
        f"{result.place}: {reached.read_gbs:.3g} GB/s, {reached.matmul_tflops:.3g} TFLOP/s "
        f"measured; {_said_shapes(result.request)}; us of one layer's call"
    )
    for workload in dict.fromkeys(row.workload for row in result.rows):
        console.print()
        console.print(_table(workload, [row for row in result.rows if row.workload == workload]))
    if result.field.refused:
        console.print()
        console.print(_refusals(result.field.refused))
    if kept is not None:
        console.print()
        console.print(_checks(kept.checks))
        console.print()
        _print_changes(console, kept)


def _checks(checks: Sequence[Check]) -> Table:
    table = Table("checked", "for", "cases", "", box=None, pad_edge=False, header_style="bold")
    for each in checks:
        note = "conformant" if each.conformant else f"not conformant: {each.failure}"
        table.add_row(each.backend, each.phase, f"{each.passed} of {each.cases}", Text(note))
    return table


def _print_changes(console: Console, kept: Kept) -> None:
    if kept.before.hash == kept.after.hash:
        console.print(f"the choice stays: {kept.after.summary()}")
    else:
        console.print(f"before: {kept.before.summary()}")
        console.print(f"now: {kept.after.summary()}")
    console.print(f"{len(kept.measurements)} figures are kept in {kept.path}", soft_wrap=True)


def _said_shapes(request: Request) -> str:
    """The heads and dtypes that were timed: "32/8 heads of 128, bfloat16"."""
    heads = f"{request.num_q_heads}/{request.num_kv_heads} heads of {request.head_dim}"
    if request.latent:
        heads = f"{request.num_q_heads} heads over a latent of {request.kv_lora_rank}"
    stored = f", KV in {request.kv_dtype}" if request.kv_dtype not in (None, request.dtype) else ""
    return f"{heads}, {request.dtype}{stored}"


def _console() -> Console:
    console = Console()
    width = console.width if console.is_terminal else WIDTH
    return Console(highlight=False, markup=False, emoji=False, width=width)


def _table(workload: Workload, rows: Sequence[Row]) -> Table:
    limit = "of bandwidth" if workload.phase == "decode" else "of matmul"
    columns = (str(workload), "us", "of the best", limit, "a step's plan, us", "page", "")
    table = Table(*columns, box=None, pad_edge=False, header_style="bold")
    for column in table.columns[1:6]:
        column.justify = "right"
    table.columns[0].overflow = table.columns[-1].overflow = "fold"
    times = [row.median_us for row in rows if row.median_us is not None]
    never = float("inf")
    for row in sorted(rows, key=lambda row: row.median_us or never):
        time, of_best, share, plan = "", "", "", ""
        if row.median_us is not None:
            time, of_best = f"{row.median_us:.1f}", f"{row.median_us / min(times):.2f}"
            share, plan = f"{row.share or 0:.0%}", f"{row.prepare_us or 0:.0f}"
        note = row.execution if row.status == "measured" else f"{row.status}: {row.why}"
        table.add_row(row.backend, time, of_best, share, plan, str(row.page_size), Text(note))
    return table


def _refusals(refused: Sequence[Refused]) -> Table:
    """Phases that a backend does not serve for the same reason in one row."""
    phases: dict[tuple[str, str], list[str]] = {}
    for each in refused:
        phases.setdefault((each.offer.address, each.why), []).append(each.phase)
    table = Table("not timed", "for", "because", box=None, pad_edge=False, header_style="bold")
    for (backend, why), those in phases.items():
        table.add_row(backend, ", ".join(those), Text(why))
    return table
