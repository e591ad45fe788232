"""`attnmux verify NAME`: the conformance suite on an installed backend, without a test file."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from random import SystemRandom
from time import monotonic

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from attnmux.core import InvalidInput, NoBackend, Plugins
from attnmux.core.verbs import FiniteRange, Run, common_options
from attnmux.testing.cases.linear import AnyCase
from attnmux.testing.run.candidate import Candidate, Outcome, find_candidate
from attnmux.testing.sampling.sampler import Sampler
from attnmux.testing.verification.kept_run import KeptRun
from attnmux.testing.verification.printed import report
from attnmux.testing.verification.run import (
    QUICK,
    Plan,
    Verification,
    limits_of,
    run_trials,
    stopping,
)
from attnmux.testing.verification.summary import Keeper

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
@click.option("--seed", type=int, help="Seed of the sampled cases and of all tensors. [random]")
@click.option(
    "--budget",
    type=FiniteRange(min=0),
    default=120.0,
    show_default=True,
    help="Seconds for cases that are sampled from the card; 0: only the fixed cases.",
)
@click.option("--quick", is_flag=True, help="Run only the sampled cases, for 30 seconds at most.")
@click.option(
    "-k",
    "pattern",
    default="",
    help="Run only the cases whose name matches this regular expression.",
)
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
    type=FiniteRange(min=1),
    default=300.0,
    show_default=True,
    help="Seconds after which a case in a child process has failed.",
)
@click.option(
    "--resume",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Keep the cases that pass in this file, and do not run those that passed there before.",
)
@click.option("--keep", is_flag=True, help="Keep a summary for `attnmux report`, and a pass.")
@common_options
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
    keep: bool,
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
    keeper = Keeper.of(candidate, plugins.offers()) if keep else None
    wanted = _pattern(pattern)
    cases = _admitted(candidate, page_sizes, execution)
    owners = {plugin.name: plugin.distribution for plugin in plugins.loaded}
    distribution = owners.get(candidate.plugin, "")
    kept = None
    if resume is not None:
        kept = KeptRun.open(resume, candidate, distribution, seed)
        seed = kept.seed
    seed = SystemRandom().randrange(1 << 31) if seed is None else seed
    sampler = Sampler(candidate=candidate, seed=seed, page_sizes=frozenset(page_sizes))
    plan = Plan(
        fixed=[] if quick else [case for case in cases if wanted.search(case.name)],
        sampled=sampler.cases(),
        is_wanted=lambda case: (
            execution in (case.execution, "all") and wanted.search(case.name) is not None
        ),
        budget=min(budget, QUICK) if quick else budget,
        seed=seed,
        kept=kept,
    )
    trials = run_trials(candidate, plan, jobs=jobs, timeout=timeout)
    trials = stopping(kept.keeping(trials) if kept else trials, fail_fast=fail_fast)
    outcomes = list(trials if as_json else _track(trials, candidate, plan))
    if pattern and not outcomes and not plan.resumed:
        expected = f"a pattern in the name of a case, such as {cases[0].name}"
        raise InvalidInput("-k", got=repr(pattern), expected=expected)
    verification = Verification(
        candidate=candidate,
        distribution=distribution,
        outcomes=(*outcomes, *plan.resumed),
        limits=tuple(limits_of(candidate)),
        seed=seed,
        is_complete=not (quick or pattern or page_sizes or fail_fast) and execution == "all",
        sampled=plan.drawn,
        pairs=sampler.coverage.total,
        pairs_covered=sampler.coverage.covered,
        resumed=len(plan.resumed),
    )
    if keeper is not None:
        keeper.keep(verification)
    if as_json:
        run.echo_json({**verification.to_dict(), "warnings": run.warnings})
        return _exit_code(verification)
    report(candidate, verification.outcomes, verification.limits)
    if kept:
        click.echo(f"{len(plan.resumed)} of these passed in an earlier run: {kept.path}")
    _say_sampled(sampler, plan)
    return _exit_code(verification)


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


def _say_sampled(sampler: Sampler, plan: Plan) -> None:
    Console(highlight=False, soft_wrap=True).print(
        f"{plan.drawn} cases sampled from the card in {math.ceil(plan.budget)} s at most: "
        f"{sampler.coverage}; repeat them with --seed {plan.seed}"
    )


def _exit_code(verification: Verification) -> int:
    if verification.has_failed:
        return FAILED
    return 0 if verification.count("passed") else NOTHING_RAN


def _track(trials: Iterable[Outcome], candidate: Candidate, plan: Plan) -> Iterator[Outcome]:
    """The trials, with the number of fixed cases and then the time of sampling, if stderr is a
    terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[told]}"))
    name = f"{candidate.card.name} on {candidate.device}"
    quiet = not console.is_terminal
    with Progress(
        *columns, TimeRemainingColumn(), console=console, transient=True, disable=quiet
    ) as progress:
        total = len(plan.fixed)
        fixed = progress.add_task(
            f"{name}: cases", total=total, visible=total > 0, told=f"0 of {total}"
        )
        sampling, begun = None, 0.0
        for count, outcome in enumerate(trials, 1):
            yield outcome
            if count <= total:
                progress.update(fixed, completed=count, told=f"{count} of {total}")
                continue
            if sampling is None:
                begun = monotonic()
                sampling = progress.add_task(f"{name}: samples", total=plan.budget, told="")
            progress.update(sampling, completed=monotonic() - begun, told=str(count - total))
