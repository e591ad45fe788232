"""What choosing by measurements costs, compared with the best backend of each step.

    python -m benchmarks.choice [--part choice] [--only "MLA"] [--without flex_attention]
    python -m benchmarks.choice --seed 7 --times FILE [--count 50] [--minutes 9] [--jobs 12]
                                [--share 1/2]
    python -m benchmarks.choice --tiny           on a CPU, of tiny sizes: figures mean nothing

Each model's steps are measured as `attnmux bench --keep` measures them, with its check of each
backend, into a file of their own. By these measurements the solver chooses, as for an engine of
that model: a backend for each phase, and others for some batch sizes of decode. Then all is
measured once more, and the second figures judge the choice.

choice   The chosen backend's time over that of the fastest which answers rightly. Bars: geometric
         mean at most 1.01, worst at most 1.05. For comparison, the cost of always taking `fa3`,
         which for MLA is `fa3_mla`.
sizes    Decode at the batch sizes that graphs are captured for: the time of each size's backend
         over that of the one backend which is best over all sizes. Bar: at no size above 1.01.

--seed N asks what an engine gets without measuring: `regret.py`. The times of its random
steps are kept in --times, and the same command goes on where it ended. Two processes, each with a
GPU of its own by CUDA_VISIBLE_DEVICES, take --share 1/2 and 2/2 into one file, or into two that
`cat` joins.

A step without a time of the chosen backend misses the bars. Requests of a step are alike. --without
leaves out backends that take long on a GPU and are chosen for none of this, as torch_native and
flex_attention; it may be repeated. A run over all models takes several minutes; --only takes a part
of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import geometric_mean

import click
import torch
from benchmarks.cases import json_option
from benchmarks.choice.measuring import (
    MODELS,
    SIZES,
    TINY_MODELS,
    TINY_SIZES,
    Measuring,
    Model,
    Served,
    failed,
)
from benchmarks.choice.regret import COLUMNS as REGRET_COLUMNS
from benchmarks.choice.regret import Times, tell, wanted
from benchmarks.choice.regret import measure as measure_steps
from benchmarks.grid import tiny as tiny_draw

from attnmux.core import Settings
from attnmux.core.verbs import Run
from attnmux.testing.bench import Report, facts
from attnmux.testing.bench.cli.asked import read_share
from attnmux.testing.bench.cli.bench_run import find_place
from attnmux.testing.bench.spot import Spot

MAX_MEAN, MAX_WORST, MAX_SIZES = 1.01, 1.05, 1.01
ALWAYS = ("nvidia/fa3", "nvidia/fa3_mla")
"""The first of these with a time on a step."""
COLUMNS = {
    **{"step": "", "model": "", "chosen": "", "us": ".1f", "against": "", "us ": ".1f"},
    **{"ratio": ".3f", "fa3's ratio": ".3f", "all, us": ""},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """A figure and its limit."""

    name: str
    found: float | None
    """None: a step has no figure."""
    most: float
    where: str

    @property
    def is_kept(self) -> bool:
        return self.found is not None and self.found <= self.most

    def __str__(self) -> str:
        found = "no figure" if self.found is None else f"{self.found:.4f}"
        verdict = "kept" if self.is_kept else "MISSED"
        return f"{self.name}: {found}, at most {self.most}: {verdict} ({self.where})"


def choice_bars(served: Sequence[Served]) -> list[Bar]:
    """Of the steps of all models."""
    ratios = {f"{each.workload}, {each.model}": each.over_best(each.chosen) for each in served}
    known = {step: ratio for step, ratio in ratios.items() if ratio is not None}
    mean, worst = "choice, geometric mean", "choice, worst"
    if len(known) < len(served):
        missing = ", ".join(step for step in ratios if step not in known) or "no step"
        where = f"without a time of the chosen backend: {missing}"
        limits = ((mean, MAX_MEAN), (worst, MAX_WORST))
        return [Bar(name=name, found=None, most=most, where=where) for name, most in limits]
    slowest = max(known, key=lambda step: known[step])
    found, where = geometric_mean(known.values()), f"of {len(known)} steps"
    return [
        Bar(name=mean, found=found, most=MAX_MEAN, where=where),
        Bar(name=worst, found=known[slowest], most=MAX_WORST, where=slowest),
    ]


def best_single(served: Sequence[Served]) -> str | None:
    """The backend with the least geometric mean of times, of those with a time at every size."""
    everywhere = set.intersection(*(set(each.times) for each in served)) if served else set()
    return min(
        sorted(everywhere),
        key=lambda address: geometric_mean([each.times[address] for each in served]),
        default=None,
    )


def sizes_bar(served: Sequence[Served]) -> Bar:
    """Of one model's decode steps at several batch sizes."""
    name, single = "decode sizes, worst", best_single(served)
    if single is None or any(each.chosen not in each.times for each in served):
        where = "a backend has no time at some size"
        return Bar(name=name, found=None, most=MAX_SIZES, where=where)
    ratios = {
        each.workload.batch_size: each.times[each.chosen] / each.times[single] for each in served
    }
    worst = max(ratios, key=lambda size: ratios[size])
    where = f"batch size {worst}, against {single} alone"
    return Bar(name=name, found=ratios[worst], most=MAX_SIZES, where=where)


def best_of_each(served: Sequence[Served]) -> list[str | None]:
    """The fastest backend of each step."""
    return [each.best for each in served]


def always(served: Sequence[Served]) -> str:
    """The cost of one backend for all."""
    ratios = [ratio for each in served if (ratio := _always(each)) is not None]
    if not ratios:
        return f"always {ALWAYS[0]}: no step has a time of it"
    return (
        f"always {ALWAYS[0]}: geometric mean {geometric_mean(ratios):.4f}, worst {max(ratios):.4f} "
        f"(of {len(ratios)} steps out of {len(served)})"
    )


def _always(served: Served) -> float | None:
    address = next((each for each in ALWAYS if each in served.times), None)
    return None if address is None else served.over_best(address)


def add(report: Report, part: str, served: Served, against: str | None) -> None:
    """Add a row. against: the backend that the chosen one is compared with."""
    fixed = None if against is None else served.times.get(against)
    mine = served.times.get(served.chosen)
    report.add(
        str(served.workload),
        served.model,
        served.chosen,
        mine,
        against,
        fixed,
        None if fixed is None or mine is None else mine / fixed,
        _always(served),
        ", ".join(f"{name} {us:.1f}" for name, us in sorted(served.times.items())),
        record={
            "part": part,
            "model": served.model,
            "workload": str(served.workload),
            "chosen": served.chosen,
            "times": dict(served.times),
        },
    )


def measure(
    report: Report,
    part: str,
    model: Model,
    measuring: Measuring,
    against: Callable[[Sequence[Served]], Sequence[str | None]],
) -> list[Served]:
    """Measure a model's steps and report them. A model that fails misses the bars."""
    try:
        served, notes = measuring.serve(model)
    except Exception as error:  # memory, or whatever a device raises: the other models go on
        served, notes = failed(model, error)
    for each, other in zip(served, against(served), strict=True):
        add(report, part, each, other)
    for text in dict.fromkeys(notes):
        click.echo(text, err=True)
    return served


def regret(
    spot: Spot,
    times: Times,
    count: int,
    minutes: float,
    jobs: int,
    share: tuple[int, int],
    path: Path | None,
    *,
    tiny: bool,
) -> None:
    """Time random steps for some minutes, then print what choosing costs on all that have times."""
    steps = list(wanted(times.seed, count))
    if tiny:
        steps = [replace(each, draw=tiny_draw(each.draw)) for each in steps]
    measure_steps(spot, times, steps, minutes, jobs, share)
    about = facts(torch.device(spot.device), "attnmux-core", seed=times.seed, count=count)
    with Report(REGRET_COLUMNS, about, path, title="regret") as report:
        tell(report, spot, times, steps)


@click.command()
@click.option("--backend", "names", multiple=True, help="Time only this backend; repeatable.")
@click.option("--without", multiple=True, help="Neither time nor choose this backend; repeatable.")
@click.option("--platform", help="A vendor, if the machine has devices of several.")
@click.option("--only", default="", help="Choose for the models whose name contains this.")
@click.option("--seconds", default=0.3, show_default=True, help="Least time for one figure.")
@click.option(
    "--check-seconds", default=3.0, show_default=True, help="Most time for one backend's check."
)
@click.option(
    "--part", type=click.Choice(["choice", "sizes"]), help="Only this part. Default: both."
)
@click.option("--seed", type=int, help="Regret without measuring, on random steps of this seed.")
@click.option("--count", default=50, show_default=True, help="With --seed: steps of each family.")
@click.option("--times", type=click.Path(path_type=Path), help="With --seed: the file of times.")
@click.option("--minutes", default=9.0, show_default=True, help="With --seed: 0 only reads times.")
@click.option("--jobs", default=0, show_default=True, help="With --seed: processes that compile.")
@click.option("--share", callback=read_share, default="1/1", help="With --seed: as 1/2 or 2/2.")
@click.option("--tiny", is_flag=True, help="Tiny steps on the CPU: figures mean nothing.")
@json_option
def main(
    names: tuple[str, ...],
    without: tuple[str, ...],
    platform: str | None,
    only: str,
    seconds: float,
    check_seconds: float,
    part: str | None,
    seed: int | None,
    count: int,
    times: Path | None,
    minutes: float,
    jobs: int,
    share: tuple[int, int],
    tiny: bool,
    path: Path | None,
) -> None:
    """Print a table, and a line for each bar: kept or MISSED."""
    if seed is not None:
        if times is None:
            raise click.UsageError("--seed keeps times in --times FILE")
        settings = Settings.load()
        settings = replace(
            settings, deny_backends=(*settings.deny_backends, *without), no_measurements=True
        )
        place = find_place(Run(), settings, "cpu" if tiny else platform, "")
        spot = Spot(
            platform=place.platform,
            device=place.device,
            offers=place.offers,
            policy=settings.policy(),
            names=names,
            seconds=seconds,
        )
        regret(spot, Times(path=times, seed=seed), count, minutes, jobs, share, path, tiny=tiny)
        return
    measuring = Measuring(
        names=names,
        without=without,
        platform="cpu" if tiny else platform,
        seconds=seconds,
        check_seconds=check_seconds,
    )
    served: list[Served] = []
    sizes: list[Served] = []
    device = torch.device("cuda" if torch.cuda.is_available() and not tiny else "cpu")
    with Report(COLUMNS, facts(device, "attnmux-core"), path) as report:
        if part != "sizes":
            for model in TINY_MODELS if tiny else MODELS:
                if only in model.name:
                    served += measure(report, "choice", model, measuring, best_of_each)
        if part != "choice":
            model = TINY_SIZES if tiny else SIZES
            sizes = measure(
                report, "sizes", model, measuring, lambda steps: [best_single(steps)] * len(steps)
            )
    bars = [*(choice_bars(served) if served else ()), *([sizes_bar(sizes)] if sizes else ())]
    said = [*map(str, bars), *([always(served)] if served else ())]
    for text in said:
        report.note(text)
    report.save(said=said)


if __name__ == "__main__":
    main()
