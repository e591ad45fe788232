"""`attnmux verify NAME`: the conformance suite on an installed backend, without a test file."""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from random import SystemRandom

import click
from rich.console import Console
from rich.progress import track

from attnmux.core import InvalidInput, NoBackend, Plugins
from attnmux.core.cli.run import Run, common_options, echo_json, pass_run
from attnmux.testing.candidate import Candidate, Outcome, find_candidate
from attnmux.testing.card_limits import outside_points, try_point
from attnmux.testing.children import Trial, run_in_children
from attnmux.testing.kept_run import KeptRun
from attnmux.testing.linear_cases import AnyCase
from attnmux.testing.sampling import Sampler
from attnmux.testing.verify_report import report

FAILED, NOTHING_RAN = 1, 3
QUICK = 30.0
"""Seconds for sampled cases in a quick run."""


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
@click.option("--seed", type=int, help="Seed of the sampled cases and of all tensors. [random]")
@click.option(
    "--budget",
    type=click.FloatRange(min=0),
    default=120.0,
    show_default=True,
    help="Seconds for cases that are sampled from the card; 0: the fixed cases alone.",
)
@click.option("--quick", is_flag=True, help="The sampled cases alone, for 30 seconds at most.")
@click.option("-k", "pattern", default="", help="Run the cases whose name has this pattern.")
@click.option("--fail-fast", is_flag=True, help="Stop after the first failure.")
@click.option(
    "--jobs",
    type=click.IntRange(min=0),
    default=1,
    show_default=True,
    help="Child processes that run cases; 0: this process, for a debugger.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=1),
    default=300.0,
    show_default=True,
    help="Seconds after which a case in a child process has failed.",
)
@click.option(
    "--resume",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Keep the cases that pass in this file, and do not run those that passed there before.",
)
@common_options
@pass_run
def verify(
    run: Run,
    backend: str,
    device: str,
    page_sizes: tuple[int, ...],
    execution: str,
    seed: int | None,
    budget: float,
    quick: bool,
    pattern: str,
    fail_fast: bool,
    jobs: int,
    timeout: float,
    resume: Path | None,
    as_json: bool,
) -> int:
    """Run the conformance suite on BACKEND.

    Fixed cases that its card admits are run and compared with the reference; the others must be
    refused. Then cases are sampled from everything that the card claims, extremes first.
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
    if find_spec("torch") is None:
        raise NoBackend(
            "verify runs the backend itself, which needs torch: pip install 'attnmux-core[torch]'"
        )
    wanted = _pattern(pattern)
    cases = _admitted(candidate, page_sizes, execution)
    kept = None
    if resume is not None:
        owners = {plugin.name: plugin.distribution for plugin in plugins.loaded}
        kept = KeptRun.open(resume, candidate, owners.get(candidate.plugin, ""), seed)
        seed = kept.seed
    seed = SystemRandom().randrange(1 << 31) if seed is None else seed
    sampler = Sampler(candidate=candidate, seed=seed, page_sizes=frozenset(page_sizes))
    plan = _Plan(
        fixed=[] if quick else [case for case in cases if wanted.search(case.name)],
        sampled=(
            case
            for case in sampler.cases()
            if execution in (case.execution, "all") and wanted.search(case.name)
        ),
        budget=min(budget, QUICK) if quick else budget,
        seed=seed,
        kept=kept,
    )
    trials = _trials(candidate, plan, jobs, timeout)
    trials = _stopping(kept.keeping(trials) if kept else trials, fail_fast=fail_fast)
    outcomes = list(trials if as_json else _track(trials, candidate))
    outcomes += plan.resumed
    limits = _limits(candidate)
    if not as_json:
        report(candidate, outcomes, limits)
        if kept:
            click.echo(f"{len(plan.resumed)} of these passed in an earlier run: {kept.path}")
        _say_sampled(sampler, plan)
        return _exit_code(outcomes, limits)
    answer = _to_dict(candidate, plan, sampler, outcomes, limits)
    echo_json({**answer, "warnings": run.warnings})
    return _exit_code(outcomes, limits)


@dataclass(kw_only=True, eq=False)
class _Plan:
    """The fixed cases, then sampled ones until the budget is spent."""

    fixed: Sequence[AnyCase]
    sampled: Iterator[AnyCase]
    budget: float
    seed: int
    kept: KeptRun | None
    drawn: int = field(default=0, init=False)
    """Sampled cases so far."""
    resumed: list[Outcome] = field(default_factory=list, init=False)
    """Of the cases that passed in the run that this one continues."""

    def trials(self) -> Iterator[Trial]:
        """The cases that are left to run."""
        for case in self._cases():
            if self.kept is not None and self.kept.has(case):
                self.resumed.append(self.kept.passed[case.name, case.execution])
            else:
                yield case, self.seed

    def _cases(self) -> Iterator[AnyCase]:
        yield from self.fixed
        end = time.monotonic() + self.budget
        # An unlimited source that is not asked once the time is over
        while time.monotonic() < end and (drawn := next(self.sampled, None)) is not None:
            self.drawn += 1
            yield drawn


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise InvalidInput("-k", got=text, expected=f"a regular expression: {error}") from None


def _admitted(candidate: Candidate, page_sizes: tuple[int, ...], execution: str) -> list[AnyCase]:
    """The fixed cases of an execution; InvalidInput if the card has none."""
    cases = [
        case for case in candidate.cases(set(page_sizes)) if execution in (case.execution, "all")
    ]
    if not cases:
        raise InvalidInput(
            "--execution",
            got=execution,
            expected=f"eager: the card of {candidate.card.name} declares no graphs",
        )
    return cases


def _to_dict(
    candidate: Candidate,
    plan: _Plan,
    sampler: Sampler,
    outcomes: list[Outcome],
    limits: list[Outcome],
) -> dict[str, object]:
    """The finished run, for `--json`."""
    counts = Counter(outcome.status for outcome in outcomes)
    return {
        "backend": candidate.card.name,
        "plugin": candidate.plugin,
        "platform": candidate.platform.to_dict(),
        "device": candidate.device,
        "seed": plan.seed,
        "resumed": len(plan.resumed),
        **{status: counts[status] for status in ("passed", "failed", "refused")},
        "sampled": plan.drawn,
        "pairs": sampler.coverage.total,
        "pairs_covered": sampler.coverage.covered,
        "max_error": max((outcome.max_error for outcome in outcomes), default=0.0),
        "cases": [outcome.to_dict() for outcome in outcomes],
        "limits": [outcome.to_dict() for outcome in limits],
    }


def _trials(candidate: Candidate, plan: _Plan, jobs: int, timeout: float) -> Iterator[Outcome]:
    """The outcomes, from child processes unless `jobs` is 0."""
    if jobs:
        return run_in_children(candidate, plan.trials(), jobs=jobs, timeout=timeout)
    from attnmux.testing.runner import run_case  # noqa: PLC0415  # torch, after the name is known

    return (run_case(candidate, case, seed=seed) for case, seed in plan.trials())


def _stopping(outcomes: Iterable[Outcome], *, fail_fast: bool) -> Iterator[Outcome]:
    for outcome in outcomes:
        yield outcome
        if fail_fast and outcome.status == "failed":
            return


def _say_sampled(sampler: Sampler, plan: _Plan) -> None:
    Console(highlight=False, soft_wrap=True).print(
        f"{plan.drawn} cases sampled from the card in {math.ceil(plan.budget)} s at most: "
        f"{sampler.coverage}; repeat them with --seed {plan.seed}"
    )


def _limits(candidate: Candidate) -> list[Outcome]:
    return [try_point(candidate, point) for point in outside_points(candidate)]


def _exit_code(outcomes: list[Outcome], limits: list[Outcome]) -> int:
    if any(outcome.status == "failed" for outcome in (*outcomes, *limits)):
        return FAILED
    return 0 if any(outcome.status == "passed" for outcome in outcomes) else NOTHING_RAN


def _track(trials: Iterable[Outcome], candidate: Candidate) -> Iterator[Outcome]:
    """The trials, with a progress bar if stderr is a terminal."""
    console = Console(stderr=True)
    yield from track(
        trials,
        description=f"{candidate.card.name} on {candidate.device}",
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
