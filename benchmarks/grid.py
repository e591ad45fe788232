"""The Triton backend beside every other backend of this machine, on random steps.

    python -m benchmarks.grid --seed 7 [--count 8] [--only decode] [--jobs 12]
    TRITON_INTERPRET=1 python -m benchmarks.grid --seed 7 --tiny      on a CPU: figures mean nothing

`grid_draws.py` has the space: heads, dims, pages, dtypes, windows, caps, sinks and lengths. A
figure is a median of `attnmux bench`: one layer's call as a model makes it, which also stores K and
V, in a graph for decode and verification. Answers are checked against float64 first. Quote figures
of seeds that no change was tuned with.

decode, verify, extend, mla …   Ours by the fastest other backend's that answers rightly.
mixed                           Ours by its parts at their best: the prompts alone and the decoding
                                requests alone, each by the fastest backend, ours included.
fp8 …                           Ours by our own with 16 bits, one after the other.
deterministic …                 Ours with `deterministic` by ours without, on the same steps.

--jobs N compiles in N processes before anything is timed. Leave out backends that take long and win
nothing by --without, as torch_native and flex_attention are by default.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import click
import torch
import triton
from benchmarks.cases import json_option
from benchmarks.grid_draws import SPACE, Draw, draws

from attnmux.core import AttnmuxError, InvalidInput, NoBackend, Platform, Settings
from attnmux.core.verbs import Run
from attnmux.testing.bench import Bench, Report, Row, Workload, ceilings, facts
from attnmux.testing.bench.cli.bench_run import Place, find_place
from attnmux.testing.bench.entrants import make_field

OURS = "triton/triton"
SLOW = ("torch_native", "flex_attention")
DETERMINISTIC = ("deterministic decode", "deterministic extend")
FAMILIES = (*SPACE, *DETERMINISTIC)
BARS = {
    "decode": (0.95, 1.02),
    "verify": (0.95, 1.02),
    "extend": (1.05, 1.15),
    "mixed": (None, 1.1),
    "mla decode": (None, 1.05),
    "mla extend": (None, 1.15),
    "fp8 decode": (None, 1 / 1.8),
    "fp8 extend": (None, 1.0),
    **dict.fromkeys(DETERMINISTIC, (1.05, None)),
}
"""The largest geometric mean and the largest single ratio that a family may have."""
COLUMNS = {"family": "", "step": "", "us": ".1f", "best": "", "us ": ".1f", "ratio": ".3f"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """A step's figures in microseconds of one layer."""

    draw: Draw
    ours: float | None
    best: str
    """The fastest other backend, or what of ours is the other side."""
    other: float | None
    notes: tuple[str, ...]

    @property
    def ratio(self) -> float | None:
        return None if self.ours is None or self.other is None else self.ours / self.other


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """Measures draws on this machine. Processes that compile get a copy."""

    without: tuple[str, ...]
    platform: str | None
    seconds: float
    """Least time for one figure."""
    ours_only: bool = False
    tiny: bool = False

    def found(self, draw: Draw) -> Found:
        """Both sides of a draw. A step that fails has no ratio, and a note."""
        own, others = self._sides(draw)
        notes = tuple(
            f"{draw}: {row.backend}: {row.status}: {row.why}"
            for row in [*own, *(row for part in others for row in part)]
            if row.status != "measured"
        )
        ours = {row.backend: row.median_us for row in own}.get(OURS)
        fastest = [_fastest(part) for part in others]
        times = [time for _, time in fastest if time is not None]
        return Found(
            draw=draw,
            ours=ours,
            best=" + ".join(name for name, _ in fastest),
            other=sum(times) if fastest and len(times) == len(fastest) else None,
            notes=notes,
        )

    def _sides(self, draw: Draw) -> tuple[Sequence[Row], Sequence[Sequence[Row]]]:
        """Ours, and what it is compared with: the sum of the fastest of each part."""
        request = draw.request
        if self.ours_only:
            return self._rows(draw, OURS), []
        if draw.family in DETERMINISTIC:
            asked = request.replace(deterministic=True)
            return self._rows(replace(draw, request=asked), OURS), [self._rows(draw, OURS)]
        if draw.family.startswith("fp8"):
            wide = replace(draw, request=request.replace(kv_dtype=request.dtype))
            return self._rows(draw, OURS), [self._rows(wide, OURS)]
        if draw.family == "mixed":
            return self._rows(draw, OURS), [self._rows(part) for part in parts(draw)]
        rows = self._rows(draw)
        return rows, [[row for row in rows if row.backend != OURS]]

    def _rows(self, draw: Draw, *names: str) -> Sequence[Row]:
        place = self.place()
        settings = replace(Settings.load(), deny_backends=self.without)
        device = torch.device(place.device)
        try:
            field = make_field(
                draw.request,
                place.platform,
                device,
                place.offers,
                settings.policy(),
                workloads=(draw.workload,),
                names=names,
            )
        except (NoBackend, InvalidInput) as refusal:
            return [_refused(draw.workload, AttnmuxError.in_brief(refusal))]
        reached = ceilings(device, torch.bfloat16, 0)
        bench = Bench(device=device, ceilings=reached, graphs=field.graphs, seconds=self.seconds)
        return tuple(bench.rows(field.workloads, field.entrants))

    def place(self) -> Place:
        """Tiny steps run on a CPU, as if it were a GPU."""
        run = Run()
        found = find_place(run, run.settings(), "cpu" if self.tiny else self.platform, "")
        return replace(found, platform=Platform.parse("nvidia:sm90")) if self.tiny else found


def _refused(workload: Workload, why: str) -> Row:
    return Row(
        workload=workload, backend=OURS, status="failed", page_size=0, execution="eager", why=why
    )


def _fastest(rows: Sequence[Row]) -> tuple[str, float | None]:
    """The backend with the least time, and its time."""
    times = {row.backend: row.median_us for row in rows if row.median_us is not None}
    best = min(times, key=lambda name: times[name], default="-")
    return best, times.get(best)


def parts(draw: Draw) -> list[Draw]:
    """The prompts and the decoding requests of a mixed step, as steps of their own."""
    work = draw.workload
    prompts = replace(work, decoding=0, ctx=0)
    decoding = Workload(phase="decode", batch_size=work.decoding, prefix=work.ctx - 1)
    return [
        replace(draw, request=draw.request.replace(phases=(each.phase,)), workload=each)
        for each in (prompts, decoding)
    ]


def chosen(only: Sequence[str], count: int, seed: int) -> Iterator[Draw]:
    for family in only or FAMILIES:
        of = family.removeprefix("deterministic ")
        for draw in draws(of, count, seed):
            yield replace(draw, family=family)


def tiny(draw: Draw) -> Draw:
    """A step of the same kind that an interpreter ends: few heads and tokens, float16."""
    asked, work = draw.request, draw.workload
    heads: dict[str, Any] = {} if asked.latent else {"num_q_heads": 4, "num_kv_heads": 2}
    if work.phase == "verify":
        heads["spec_draft_tokens"] = min(work.new, 3)
    kv_dtype = "fp8_e5m2" if asked.kv_dtype != asked.dtype else "float16"
    new = min(work.new, 3)
    decoding, ctx = (2, 21) if work.decoding else (0, 0)
    return replace(
        draw,
        request=asked.replace(dtype="float16", kv_dtype=kv_dtype, **heads),
        workload=Workload(
            phase=work.phase, batch_size=2, new=new, prefix=17, decoding=decoding, ctx=ctx
        ),
    )


def summary(family: str, found: Sequence[Found]) -> str:
    """The ratios of a family in one line, and whether its bars are kept."""
    ratios = {str(each.draw): each.ratio for each in found if each.ratio is not None}
    if not ratios:
        return f"{family}: nothing to compare with"
    mean, where = geometric_mean(ratios.values()), max(ratios, key=lambda name: ratios[name])
    most_mean, most = BARS[family]
    missed = (most_mean is not None and mean > most_mean) or (
        most is not None and ratios[where] > most
    )
    bars = [f"geometric mean {most_mean}"] * (most_mean is not None)
    bars += [] if most is None else [f"worst {most:.3f}"]
    return (
        f"{family}: geometric mean {mean:.3f}, worst {ratios[where]:.3f} ({where}); "
        f"{len(ratios)} of {len(found)} steps; bars: {', '.join(bars)}: "
        f"{'MISSED' if missed else 'kept'}"
    )


@click.command()
@click.option("--seed", type=int, required=True, help="Of the draws.")
@click.option("--count", type=click.IntRange(1), default=8, show_default=True, help="Steps each.")
@click.option("--only", multiple=True, type=click.Choice(FAMILIES), help="Default: all.")
@click.option("--without", multiple=True, default=SLOW, show_default=True, help="Repeatable.")
@click.option("--seconds", default=0.3, show_default=True, help="Least time for one figure.")
@click.option("--jobs", type=click.IntRange(0), default=0, help="Processes that compile first.")
@click.option("--platform", help="A vendor, if the machine has devices of several.")
@click.option("--ours-only", is_flag=True, help="Time the Triton backend alone; see releases.py.")
@click.option("--tiny", "is_tiny", is_flag=True, help="Tiny steps: figures mean nothing.")
@json_option
def main(
    seed: int,
    count: int,
    only: tuple[str, ...],
    without: tuple[str, ...],
    seconds: float,
    jobs: int,
    platform: str | None,
    ours_only: bool,
    is_tiny: bool,
    path: Path | None,
) -> None:
    """Print each step's ratio, and each family's geometric mean and worst."""
    if is_tiny and not triton.knobs.runtime.interpret:
        raise click.UsageError("--tiny runs kernels in Triton's interpreter: TRITON_INTERPRET=1")
    grid = Grid(
        without=without, platform=platform, seconds=seconds, ours_only=ours_only, tiny=is_tiny
    )
    steps = list(chosen(only, count, seed))
    if is_tiny:
        steps = [tiny(draw) for draw in steps]
    if jobs:
        compile_ahead(grid, steps, jobs)
    everything = report(grid, steps, path, seed=seed, count=count)
    for text in dict.fromkeys(note for each in everything for note in each.notes):
        click.echo(f"- {text}")
    for family in dict.fromkeys(each.draw.family for each in everything):
        click.echo(summary(family, [each for each in everything if each.draw.family == family]))


def compile_ahead(grid: Grid, steps: Sequence[Draw], jobs: int) -> None:
    """Run each step once, in several processes: what compilers make is on the disk afterwards."""
    quick = replace(grid, seconds=1e-3)
    spawned = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=spawned) as pool:
        list(pool.map(quick.found, steps))


def report(grid: Grid, steps: Sequence[Draw], path: Path | None, **of: object) -> list[Found]:
    """Measure the steps, and print a row for each."""
    device = torch.device(grid.place().device)
    about = facts(device, "triton", "flashinfer-python", "sglang-kernel", **of)
    everything: list[Found] = []
    with Report(COLUMNS, about, path, title="us of a layer") as table:
        for draw in steps:
            found = grid.found(draw)
            everything.append(found)
            table.add(draw.family, str(draw), found.ours, found.best, found.other, found.ratio)
    return everything


if __name__ == "__main__":
    main()
