"""Tables for people. Imported only where a table is printed: rich costs as much as the answer."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from attnmux.core.choosing.card import Offer
from attnmux.core.choosing.decision import Decision
from attnmux.core.choosing.platform import Platform
from attnmux.core.choosing.verdict import Reason, Verdict

WIDTH = 100


def _console() -> Console:
    console = Console()
    # A pipe has no width of its own
    width = min(console.width, WIDTH) if console.is_terminal else WIDTH
    # Markup would take the extra in "pip install 'attnmux-cpu[torch]'" for a style, and drop it
    return Console(highlight=False, markup=False, emoji=False, width=width)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _print_table(table: Table) -> None:
    _console().print(table)


def render_platforms(platforms: Sequence[Platform], picked: str | None) -> None:
    table = _table("", "platform", "name", "count", "memory", "cores", "runtime", "features")
    for platform in platforms:
        table.add_row(
            "*" if str(platform) == picked else "",
            f"{platform.vendor}:{platform.arch}",
            platform.name,
            str(platform.count),
            f"{platform.memory_bytes / 1e9:.0f} GB" if platform.memory_bytes else "",
            str(platform.core_count or ""),
            platform.runtime,
            " ".join(sorted(platform.features)),
        )
    _print_table(table)


def render_backends(rows: Sequence[tuple[Offer, Sequence[Reason]]]) -> None:
    table = _table("backend", "plugin", "from", "here", "summary")
    for offer, reasons in rows:
        table.add_row(
            offer.card.name,
            offer.plugin,
            f"{offer.distribution} {offer.version}".strip(),
            "; ".join(reason.hint or str(reason) for reason in reasons) or "ready",
            offer.card.summary,
        )
    _print_table(table)


def render_decision(decision: Decision) -> None:
    """The summary, the coercions, and each candidate with the first reason against it."""
    console = _console()
    console.print(Text(decision.summary()))
    for change in decision.coercions:
        line = (
            f"{change.field}: {change.old} ({change.origin}) became {change.new}: {change.because}"
        )
        console.print(Text(line, style="yellow"))
    table = _table("phase", "backend", "plugin", "rank", "verdict")
    for verdict in decision.candidates:
        choice = decision.phases[verdict.phase]
        chosen = (choice.backend, choice.plugin) == (verdict.backend, verdict.plugin)
        table.add_row(
            verdict.phase,
            verdict.backend,
            verdict.plugin,
            "" if verdict.rank is None else str(verdict.rank),
            "chosen" if chosen else _outcome(verdict),
            style="bold" if chosen else None,
        )
    console.print()
    console.print(table)
    console.print()
    console.print(Text(f"decision {decision.hash[:16]}", style="dim"))


def _outcome(verdict: Verdict) -> str:
    if not verdict.reasons:
        return verdict.verdict
    more = f" (and {len(verdict.reasons) - 1} more)" if len(verdict.reasons) > 1 else ""
    return f"{verdict.verdict}: {verdict.reasons[0]}{more}"
