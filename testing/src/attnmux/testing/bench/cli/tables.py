"""Tables of `attnmux bench` and `attnmux tune`. `--json` never imports them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from attnmux.core import Platform, Request
from attnmux.core.plugin import OptionValue, Trial
from attnmux.core.verbs import plain_console, plain_table
from attnmux.testing.bench.linear_work import CONV_CHANNELS, dims
from attnmux.testing.bench.trials import by_subject, winner
from attnmux.testing.bench.workload import Workload

if TYPE_CHECKING:  # torch, which a table does not need
    from attnmux.testing.bench.cli.bench_run import Kept, Result
    from attnmux.testing.bench.conformance import Check
    from attnmux.testing.bench.entrants import Refused
    from attnmux.testing.bench.measuring import Row
    from attnmux.testing.bench.roofline import Ceilings

NEVER = float("inf")
BEYOND_SAID = "beyond the ceiling: K and V from a cache, or a faster dtype"


def print_bench(result: Result, kept: Kept | None) -> None:
    """Print a table for each workload, fastest first, the refusals, and how the choice changes."""
    console, reached = plain_console(), result.ceilings
    console.print(
        f"{result.place}: {reached} "
        f"measured; {shapes(result.request)}; us of one layer's call, plan: of a step; "
        f"error: rms in roundings of {result.request.dtype} (of the worst query and head)"
    )
    if result.rounding:
        moved = ", ".join(f"{error:.2g} in {name}" for name, error in result.rounding.items())
        console.print(f"rounding of K and V alone: {moved}, of a result's norm")
    margins = {margin.workload: margin for margin in result.margins}
    for workload in dict.fromkeys(row.workload for row in result.rows):
        console.print()
        rows = [row for row in result.rows if row.workload == workload]
        console.print(_times(workload, rows, reached))
        if workload in margins:
            console.print(str(margins[workload]))
    if result.field.refused:
        console.print()
        console.print(_refusals(result.field.refused))
    if kept is not None:
        console.print()
        console.print(_checks(kept.checks))
        console.print()
        _print_changes(console, kept)


def shapes(request: Request) -> str:
    """The heads and dtypes that were timed: "32/8 heads of 128, bfloat16"."""
    heads = f"{request.num_q_heads}/{request.num_kv_heads} heads of {request.head_dim}"
    if request.is_linear:
        heads = _linear_shapes(request)
    elif request.latent:
        heads = f"{request.num_q_heads} heads over a latent of {request.kv_lora_rank}"
    stored = f", KV in {request.kv_dtype}" if request.kv_dtype not in (None, request.dtype) else ""
    return f"{heads}, {request.dtype}{stored}"


def _linear_shapes(request: Request) -> str:
    """The layers that were timed: "gdn, 32/16 heads of 128 x 128"."""
    if request.kind == "conv":
        return f"conv of {CONV_CHANNELS} channels"
    heads, k_heads, dim, v_dim = dims(request)
    return f"{request.kind}, {heads}/{k_heads} heads of {dim} x {v_dim}"


def _times(workload: Workload, rows: Sequence[Row], reached: Ceilings) -> Table:
    limits = {reached.limit(row.cost) for row in rows if row.cost is not None}
    share_of = f"of {limits.pop()}" if len(limits) == 1 else "of the roof"
    table = plain_table(
        str(workload), "us", "of the best", share_of, "error (worst)", "plan, us", "page", ""
    )
    table.columns[0].no_wrap = True
    for column in table.columns[1:7]:
        column.justify = "right"
    times = [row.median_us for row in rows if row.median_us is not None]
    for row in sorted(rows, key=lambda row: row.median_us or NEVER):
        time, of_best, share, plan = "", "", "", ""
        error = "" if row.rms_error is None else f"{row.rms_error:.2g} ({row.worst_error:.2g})"
        if row.median_us is not None:
            time, of_best = f"{row.median_us:.1f}", f"{row.median_us / min(times):.2f}"
            share, plan = f"{row.share or 0:.0%}", f"{row.prepare_us or 0:.0f}"
        note = row.execution if row.status == "measured" else f"{row.status}: {row.why}"
        if row.is_beyond:
            note += f", {BEYOND_SAID}"
        table.add_row(
            row.backend, time, of_best, share, error, plan, str(row.page_size), Text(note)
        )
    return table


def _refusals(refused: Sequence[Refused]) -> Table:
    """One row for the phases that a backend refuses for the same reason."""
    phases: dict[tuple[str, str], list[str]] = {}
    for each in refused:
        phases.setdefault((each.offer.address, each.why), []).append(each.phase)
    table = plain_table("not timed", "for", "because")
    for (backend, why), refusals in phases.items():
        table.add_row(backend, ", ".join(refusals), Text(why))
    return table


def _checks(checks: Sequence[Check]) -> Table:
    table = plain_table("checked", "for", "cases", "")
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


def print_trials(name: str, platform: Platform, trials: Sequence[Trial]) -> None:
    """Print the launches that a backend tried, fastest first."""
    console = plain_console()
    for subject, tried in by_subject(trials).items():
        console.print(Text(f"{name} on {platform.name or platform}: {_assignments(subject)}"))
        console.print(_trials(tried))


def _trials(trials: Sequence[Trial]) -> Table:
    table = plain_table("launch", "us", "of today's", "")
    table.columns[1].justify = table.columns[2].justify = "right"
    today = [trial.median_us for trial in trials if trial.is_current and trial.median_us]
    best = winner(trials)
    for trial in sorted(trials, key=lambda trial: trial.median_us or NEVER):
        time, share = "", ""
        if trial.median_us is not None:
            time = f"{trial.median_us:.1f}"
            share = f"{trial.median_us / today[0]:.3f}" if today else ""
        word = "won" if trial is best else "today's" if trial.is_current else ""
        note = ": ".join(filter(None, (word, trial.error)))
        table.add_row(Text(_assignments(trial.values)), time, share, Text(note))
    return table


def _assignments(values: Mapping[str, OptionValue]) -> str:
    return " ".join(f"{name}={value}" for name, value in values.items())
