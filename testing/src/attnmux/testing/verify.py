"""`attnmux verify NAME`: the conformance suite on an installed backend, with no test file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import click

from attnmux.core.choosing.find.plugins import Plugins
from attnmux.core.cli.run import Run, common_options, echo_json, pass_run
from attnmux.core.errors import InvalidInput, NoBackend
from attnmux.testing.candidate import Candidate, find_candidate
from attnmux.testing.cases import Case
from attnmux.testing.limits import outside_points, try_point

if TYPE_CHECKING:
    from attnmux.testing.outcome import Outcome

FAILED, NOTHING_RAN = 1, 3


@click.command()
@click.argument("backend")
@click.option("--device", default="", help="torch's word: cpu, cuda:1, … [default: by the card]")
@click.option(
    "--page-size",
    "page_sizes",
    type=click.IntRange(min=1),
    multiple=True,
    help="Instead of the usual ones and those that the card names; may be repeated.",
)
@click.option(
    "--execution",
    type=click.Choice(["eager", "graph", "all"]),
    default="all",
    show_default=True,
    help="How cases are run. In graphs only where the card declares them.",
)
@click.option("--seed", default=0, show_default=True, help="Of the random numbers.")
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

    What its card admits is run and compared with the reference; what it does not has to be
    refused. Exits with 0 when all is well, 1 when something failed, 3 when no case can run here.
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
            came=execution,
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
    from attnmux.testing.verify_report import report, track  # noqa: PLC0415  # rich, off the JSON path

    outcomes = list(track(trials, len(cases), candidate))
    limits = _limits(candidate)
    report(candidate, outcomes, limits)
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
