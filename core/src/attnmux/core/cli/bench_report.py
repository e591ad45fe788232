"""Progress and result of `attnmux bench` for people; `--json` never imports it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console
from rich.progress import track as rich_track
from rich.table import Table
from rich.text import Text

from attnmux.core.benching.measuring import Row
from attnmux.core.benching.subjects import Refused
from attnmux.core.benching.timing import Ceilings
from attnmux.core.benching.workload import Workload
from attnmux.core.choosing.request import Request

WIDTH = 100


def track(rows: Iterable[Row], total: int, place: str) -> Iterator[Row]:
    """The rows, with a progress bar on stderr where that is a terminal."""
    console = Console(stderr=True)
    yield from rich_track(
        rows,
        total=total,
        description=f"timing on {place}",
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def report(
    place: str,
    request: Request,
    reached: Ceilings,
    rows: Sequence[Row],
    refused: Sequence[Refused],
) -> None:
    """A table for each workload, the fastest first, and who was not timed and why."""
    console = _console()
    console.print(
        f"{place}: {reached.read_gbs:.0f} GB/s, {reached.matmul_tflops:.3g} TFLOP/s measured; "
        f"{said_shapes(request)}; us of one layer's call"
    )
    for workload in dict.fromkeys(row.workload for row in rows):
        console.print()
        console.print(_table(workload, [row for row in rows if row.workload == workload]))
    if refused:
        console.print()
        console.print(_refusals(refused))


def said_shapes(request: Request) -> str:
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
