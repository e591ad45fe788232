"""What choosing by measurements costs against the best backend of each step.

    python -m benchmarks.choice [--part choice] [--only "MLA"] [--without flex_attention]
    python -m benchmarks.choice --tiny           on a CPU, of tiny sizes: figures mean nothing

Each model's steps are measured by what is behind `attnmux bench --keep`, with its check of each
backend, into a file of their own. By these measurements the solver chooses, as for an engine of
that model: a backend for each phase, and others for some batch sizes of decode. Then all is
measured once more, and the second figures judge the choice.

choice   The chosen backend's time over that of the fastest which answers rightly. Bars: geometric
         mean at most 1.01, worst at most 1.05. Beside it what always taking `fa3` costs, which for
         MLA is `fa3_mla`.
sizes    Decode at the batch sizes that graphs are captured for: the time of each size's backend
         over that of the one backend which is best over all sizes. Bar: at no size above 1.01.

A step without a time of the chosen backend misses the bars. Requests of a step are alike. Backends
that take long on a GPU and are chosen for none of this are left out by --without, which may be
repeated: torch_native, flex_attention. A run over all models takes several minutes; --only takes a
part of them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from benchmarks.choice_measuring import Measuring, Served, failed
from benchmarks.choice_workloads import MODELS, SIZES, TINY_MODELS, TINY_SIZES, Model

MAX_MEAN, MAX_WORST, MAX_BEHIND = 1.01, 1.05, 1.01
ALWAYS = ("nvidia/fa3", "nvidia/fa3_mla")
"""The first that has a time on a step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """A figure with what it must not exceed."""

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


def mean(ratios: Sequence[float]) -> float:
    """Geometric."""
    return math.exp(math.fsum(map(math.log, ratios)) / len(ratios))


def choice_bars(served: Sequence[Served]) -> list[Bar]:
    """Of the steps of all models."""
    ratios = {_step(each): each.over_best(each.chosen) for each in served}
    known = {step: ratio for step, ratio in ratios.items() if ratio is not None}
    if len(known) < len(served):
        missing = ", ".join(step for step in ratios if step not in known) or "no step"
        where = f"without a time of the chosen backend: {missing}"
        return [
            Bar(name="choice, geometric mean", found=None, most=MAX_MEAN, where=where),
            Bar(name="choice, worst", found=None, most=MAX_WORST, where=where),
        ]
    worst = max(known, key=lambda step: known[step])
    of_all = f"of {len(known)} steps"
    return [
        Bar(
            name="choice, geometric mean",
            found=mean(list(known.values())),
            most=MAX_MEAN,
            where=of_all,
        ),
        Bar(name="choice, worst", found=known[worst], most=MAX_WORST, where=worst),
    ]


def best_single(served: Sequence[Served]) -> str | None:
    """The backend with the least geometric mean of times, of those with a time at every size."""
    everywhere = set.intersection(*(set(each.times) for each in served)) if served else set()
    return min(
        sorted(everywhere),
        key=lambda address: mean([each.times[address] for each in served]),
        default=None,
    )


def sizes_bar(served: Sequence[Served]) -> Bar:
    """Of one model's decode steps at several batch sizes."""
    name, single = "decode sizes, worst", best_single(served)
    if single is None or any(each.chosen not in each.times for each in served):
        where = "a backend has no time at some size"
        return Bar(name=name, found=None, most=MAX_BEHIND, where=where)
    behind = {
        each.workload.batch_size: each.times[each.chosen] / each.times[single] for each in served
    }
    worst = max(behind, key=lambda size: behind[size])
    where = f"batch size {worst}, against {single} alone"
    return Bar(name=name, found=behind[worst], most=MAX_BEHIND, where=where)


def always(served: Sequence[Served]) -> str:
    """What one backend for all costs."""
    ratios = [ratio for each in served if (ratio := _always(each)) is not None]
    if not ratios:
        return f"always {ALWAYS[0]}: no step has a time of it"
    return (
        f"always {ALWAYS[0]}: geometric mean {mean(ratios):.4f}, worst {max(ratios):.4f} "
        f"(of {len(ratios)} steps out of {len(served)})"
    )


def _always(served: Served) -> float | None:
    address = next((each for each in ALWAYS if each in served.times), None)
    return None if address is None else served.over_best(address)


def _step(served: Served) -> str:
    return f"{served.workload}, {served.model}"


def line(served: Served, against: str | None) -> str:
    """A row of the table. against: whom the chosen backend is compared with."""
    fixed = None if against is None else served.times.get(against)
    mine = served.times.get(served.chosen)
    ratio = None if fixed is None or mine is None else mine / fixed
    cells = [str(served.workload), served.model, served.chosen, _us(mine), against or "-"]
    others = ", ".join(f"{name} {us:.1f}" for name, us in sorted(served.times.items()))
    cells += [_us(fixed), _ratio(ratio), _ratio(_always(served)), others]
    return f"| {' | '.join(cells)} |"


def _us(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def measure(
    model: Model, measuring: Measuring, against: Callable[[Sequence[Served]], Sequence[str | None]]
) -> list[Served]:
    """Measure a model's steps and print them; what goes wrong is told and misses the bars."""
    try:
        served, told = measuring.serve(model)
    except Exception as error:  # memory, or whatever a device raises: the other models go on
        served, told = failed(model, error)
    for each, other in zip(served, against(served), strict=True):
        click.echo(line(each, other))
    for text in dict.fromkeys(told):
        click.echo(text, err=True)
    return served


@click.command()
@click.option("--backend", "names", multiple=True, help="Only this one; may be repeated.")
@click.option("--without", multiple=True, help="Neither time nor choose this one.")
@click.option("--platform", help="A vendor, where several are here.")
@click.option("--only", default="", help="Choose for the models whose name contains this.")
@click.option("--seconds", default=0.3, show_default=True, help="Least time for one figure.")
@click.option(
    "--check-seconds", default=3.0, show_default=True, help="Most time for one backend's check."
)
@click.option(
    "--part", type=click.Choice(["choice", "sizes"]), help="Only this part. Default: both."
)
@click.option("--tiny", is_flag=True, help="Tiny steps on the CPU: figures mean nothing.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write the figures here too.")
def main(
    names: tuple[str, ...],
    without: tuple[str, ...],
    platform: str | None,
    only: str,
    seconds: float,
    check_seconds: float,
    part: str | None,
    tiny: bool,
    path: Path | None,
) -> None:
    """Print a table, and a line for each bar: kept or MISSED."""
    measuring = Measuring(
        names=names,
        without=without,
        platform="cpu" if tiny else platform,
        seconds=seconds,
        check_seconds=check_seconds,
    )
    click.echo(
        "| step | model | chosen | us | against | us | ratio | fa3's ratio | all, us |\n"
        + "|---" * 9
        + "|"
    )
    served: list[Served] = []
    sizes: list[Served] = []
    if part != "sizes":
        for model in TINY_MODELS if tiny else MODELS:
            if only not in model.name:
                continue
            served += measure(model, measuring, lambda steps: [each.best for each in steps])
    if part != "choice":
        model = TINY_SIZES if tiny else SIZES
        sizes = measure(model, measuring, lambda steps: [best_single(steps)] * len(steps))
    bars = [*(choice_bars(served) if served else ()), *([sizes_bar(sizes)] if sizes else ())]
    said = [*map(str, bars), *([always(served)] if served else ())]
    click.echo("\n" + "\n".join(said))
    if path is not None:
        steps = {"choice": list(map(_told, served)), "sizes": list(map(_told, sizes))}
        path.write_text(json.dumps({**steps, "said": said}, indent=1))


def _told(served: Served) -> dict[str, Any]:
    return {
        "model": served.model,
        "workload": str(served.workload),
        "chosen": served.chosen,
        "times": dict(served.times),
    }


if __name__ == "__main__":
    main()
