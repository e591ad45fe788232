"""`attnmux verify NAME`: the conformance suite on an installed backend, without a test file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import click
from rich.console import Console
from rich.progress import track
from rich.table import Table
from rich.text import Text

from attnmux.core import InvalidInput, NoBackend, Plugins
from attnmux.core.cli.run import Run, common_options, echo_json, pass_run
from attnmux.testing.candidate import Candidate, Outcome, find_candidate
from attnmux.testing.card_limits import outside_points, try_point
from attnmux.testing.cases import Case

FAILED, NOTHING_RAN = 1, 3


@click.command()
@click.argument("backend")
@click.option("--device", default="", help="torch's name: cpu, cuda:1, … [default: by the card]")
@click.option(
    "--page-size",
    "page_sizes",
    type=click.IntRange(min=1),
    multiple=True,
    help="Replaces the usual ones and those that the card names; may be repeated.",
)
@click.option(
    "--execution",
    type=click.Choice(["eager", "graph", "all"]),
    default="all",
    show_default=True,
    help="How cases are run. Graphs need a card that declares them.",
)
@click.option("--seed", default=0, show_default=True, help="Seed of the random numbers.")
@common_options
@pass_run
def verify(
    run: Run,
    backend: str,
    device: str,
    page_sizes: tuple[int, ...],
    execution: str,
    seed: int,
    as_json: bool,
) -> int:
    """Run the conformance suite on BACKEND.

    Cases that its card admits are run and compared with the reference; the others must be refused.
    Exits with 0 when all is well, 1 when something failed, 3 when no case can run here.
    """
    settings = run.settings()
    plugins: Plugins = run.plugins(settings)
    candidate = find_candidate(
        backend,
        device=device,
        plugins=plugins,
        platforms=run.detect(plugins).platforms,
        launches=run.launches(settings),
    )
    cases = [
        case for case in candidate.cases(set(page_sizes)) if execution in (case.execution, "all")
    ]
    if not cases:
        raise InvalidInput(
            "--execution",
            got=execution,
            expected=f"eager: the card of {candidate.card.name} declares no graphs",
        )
    trials = _trials(candidate, cases, seed)
    if as_json:
        outcomes = list(trials)
        limits = _limits(candidate)
        counts = Counter(outcome.status for outcome in outcomes)
        echo_json(
            {
                "backend": candidate.card.name,
                "plugin": candidate.plugin,
                "platform": candidate.platform.to_dict(),
                "device": candidate.device,
                "seed": seed,
                **{status: counts[status] for status in ("passed", "failed", "refused")},
                "max_error": max((outcome.max_error for outcome in outcomes), default=0.0),
                "cases": [outcome.to_dict() for outcome in outcomes],
                "limits": [outcome.to_dict() for outcome in limits],
                "warnings": run.warnings,
            }
        )
        return _exit_code(outcomes, limits)
    outcomes = list(_track(trials, len(cases), candidate))
    limits = _limits(candidate)
    _report(candidate, outcomes, limits)
    return _exit_code(outcomes, limits)


def _trials(candidate: Candidate, cases: Iterable[Case], seed: int) -> Iterator[Outcome]:
    try:
        from attnmux.testing.runner import run_case  # noqa: PLC0415  # torch, after the name is known
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise NoBackend(
            "verify runs the backend itself, which needs torch: pip install 'attnmux-core[torch]'"
        ) from error
    for case in cases:
        yield run_case(candidate, case, seed=seed)


def _limits(candidate: Candidate) -> list[Outcome]:
    return [try_point(candidate, point) for point in outside_points(candidate)]


def _exit_code(outcomes: list[Outcome], limits: list[Outcome]) -> int:
    if any(outcome.status == "failed" for outcome in (*outcomes, *limits)):
        return FAILED
    return 0 if any(outcome.status == "passed" for outcome in outcomes) else NOTHING_RAN


def _track(trials: Iterable[Outcome], total: int, candidate: Candidate) -> Iterator[Outcome]:
    """The trials, with a progress bar if stderr is a terminal."""
    console = Console(stderr=True)
    yield from track(
        trials,
        total=total,
        description=f"{candidate.card.name} on {candidate.device}",
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def _report(candidate: Candidate, outcomes: Sequence[Outcome], limits: Sequence[Outcome]) -> None:
    """Print failures, refusals by reason, and the number of cases that ran."""
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
    """The number of cases that agree, by execution."""
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
    """Refused cases by their first reason, since most share a few."""
    counts = Counter(str(outcome.reasons[0]) for outcome in refused)
    table = Table("cases", "reason", title="refused by the card", box=None)
    for reason, count in counts.most_common():
        table.add_row(str(count), Text(reason))
    return table
