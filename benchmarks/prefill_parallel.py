"""A long prompt on several ranks, compared with one rank alone in the same run.

    torchrun --nproc-per-node 8 -m benchmarks.prefill_parallel [--backend fa3] [--layers 8]
    torchrun --nproc-per-node 2 -m benchmarks.prefill_parallel --tokens 1024     on a CPU, by gloo

A figure is device time in milliseconds, of the slowest rank, the writes of K and V included.
`alone` is the backend on the first rank while the others wait. `split` is `PrefillParallelBackend`
over the same backend on all ranks, and `speedup` alone over split. `at once` waits for all K and V
before attention begins, `travel` is their communication without any attention, and `hidden` the
share of it that split saves over at once: (at once - split) / travel. `metadata` is the step's
preparation on the host, once for all layers. `error` is the largest difference of the answers, as a
share of the largest value: the script ends where it is more than rounding explains.
--profile writes a trace of the first rank's last split run, and prints for how much of the time
that communication takes another kernel runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import click
import torch
import torch.distributed as dist
from benchmarks.cases import extend, json_option, rounds_option
from torch.profiler import ProfilerActivity, profile

from attnmux.core import (
    AttentionBackend,
    BackendContext,
    InvalidInput,
    NoBackend,
    Platform,
    Plugins,
    Policy,
    build,
    make_backend,
    solve,
)
from attnmux.distributed import (
    PrefillParallelBackend,
    RankGroup,
    ZigzagStep,
    split_context,
    zigzag_step,
)
from attnmux.distributed.kv_rows import KVRows
from attnmux.distributed.prefill_parallel import ChunkGather
from attnmux.parts import parts_request
from attnmux.testing.bench import Report, Step, device_meter, facts, in_turn, interleave, wall_meter
from attnmux.testing.bench.timing import Meter, Run, wait

MOST_ERROR = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}
"""As a share of the largest value: a few roundings of the output."""
PATIENCE = 600.0
"""Seconds that ranks wait for the first one alone."""
COLUMNS = {
    **{"layers": "d", "alone, ms": ",.2f", "split, ms": ",.2f", "speedup": ".2f"},
    **{"at once, ms": ",.2f", "travel, ms": ",.2f", "hidden": ".0%", "metadata, ms": ".2f"},
    "error": ".5f",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Sides:
    """One step in every way that is timed."""

    group: RankGroup
    whole: Step
    alone: AttentionBackend
    step: ZigzagStep
    split: PrefillParallelBackend
    at_once: PrefillParallelBackend
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    """[T of this rank, Hq, Dv]"""

    def calls(self, backend: AttentionBackend) -> list[Run]:
        """Each layer's call of this rank."""
        return [
            partial(backend.forward, self.q, self.k, self.v, layer, self.step, out=self.out)
            for layer in self.whole.layers
        ]

    def travels(self) -> list[Run]:
        """Each layer's communication alone."""
        kv = [KVRows(pool=self.whole.pool, layer=layer) for layer in self.whole.layers]
        own = kv[0].of(self.k, self.v)
        rows = own.new_empty((len(self.step.order), kv[0].width))
        at_once = self.split.chunks_at_once

        def travel() -> None:
            ChunkGather(self.group, self.step, own, rows, chunks_at_once=at_once).wait()

        return [travel for _ in kv]

    def error(self) -> float:
        """The largest difference from the first rank's answer. Raises InvalidInput for a pool with
        other K and V than the step's."""
        group, whole = self.group, self.whole
        if group.rank == 0:
            whole.calls(self.alone)[0]()
        expected = group.broadcast(whole.out)[self.step.rows].float()
        self.calls(self.split)[0]()
        off = (self.out.float() - expected).abs().max() / whole.out.float().abs().max()
        error = float(group.all_reduce(off, dist.ReduceOp.MAX))
        loc, layer = whole.batch.out_cache_loc, whole.layers[0].layer_id
        for buffer, rows in zip(whole.pool.get_kv_buffer(layer), (whole.k, whole.v), strict=True):
            if rows is None or not torch.equal(buffer[loc], rows):
                raise InvalidInput("pool", got="other K and V", expected="those of the whole step")
        if not error <= MOST_ERROR[self.q.dtype]:
            expected_error = f"at most {MOST_ERROR[self.q.dtype]:g}, as {group.size} ranks round"
            raise InvalidInput("answer", got=f"an error of {error:g}", expected=expected_error)
        return error


def make_sides(
    group: RankGroup,
    platform: Platform,
    *,
    backend: str,
    tokens: int,
    layers: int,
    dtype: str,
    lanes: int,
    chunks_at_once: int | None,
) -> tuple[Sides, str]:
    """The sides, and the names of their backends. A named backend also runs the parts where its
    card leaves out cross attention. Raises NoBackend where none serves the step."""
    offers, policy = Plugins.load().offers(), Policy(backend=backend or None)
    case = extend(1, tokens, 0, dtype=dtype)
    asked = case.request.replace(phases=("extend",))
    decision = solve(asked, platform, offers, policy)
    choice, note = decision.phases["extend"], ""
    try:
        choice = solve(parts_request(asked), platform, offers, policy).phases["extend"]
    except NoBackend:
        if not backend:
            raise
        note = ", whose card does not offer that"
    whole = case.step(group.device, layers)
    for values in (whole.q, whole.k, whole.v):
        if values is not None:
            group.broadcast(values)  # the same on every kind of device
    context: BackendContext = whole.context(platform, decision.request)
    alone = build(decision, context)
    alone.init_forward_metadata(whole.batch)
    context = alone.context
    step = zigzag_step(whole.batch, rank=group.rank, size=group.size)

    def made(*, overlap: bool) -> PrefillParallelBackend:
        parts = [make_backend(choice, split_context(context)) for _ in range(lanes)]
        return PrefillParallelBackend(
            inner=alone, parts=parts, group=group, overlap=overlap, chunks_at_once=chunks_at_once
        )

    split, at_once = made(overlap=True), made(overlap=False)
    assert whole.v is not None
    for each in (split, at_once):
        each.init_forward_metadata(step)
    sides = Sides(
        group=group,
        whole=whole,
        alone=alone,
        step=step,
        split=split,
        at_once=at_once,
        q=whole.q[step.rows],
        k=whole.k[step.rows],
        v=whole.v[step.rows],
        out=whole.out[: len(step.rows)].clone(),
    )
    return sides, f"{decision.phases['extend'].backend}, parts by {choice.backend}{note}"


def of_slowest(group: RankGroup, meter: Meter | None) -> Meter:
    """The time of the slowest rank, all beginning together. None: this rank only waits."""

    def measure() -> float:
        group.all_reduce(torch.zeros(1, device=group.device))
        wait(group.device)
        taken = torch.tensor([0.0 if meter is None else meter()], device=group.device)
        return float(group.all_reduce(taken, dist.ReduceOp.MAX))

    return measure


def measure(sides: Sides, count: int, rounds: int) -> tuple[float | int, ...]:
    """A row for the first `count` layers, but for the error."""
    group, whole = sides.group, sides.whole
    device = group.device
    runs = {
        "split": sides.calls(sides.split),
        "at once": sides.calls(sides.at_once),
        "travel": sides.travels(),
    }
    meters = {
        name: of_slowest(group, device_meter(in_turn(calls[:count]), device, 1))
        for name, calls in runs.items()
    }
    alone = device_meter(in_turn(whole.calls(sides.alone)[:count]), device, 1)
    meters["alone"] = of_slowest(group, alone if group.rank == 0 else None)
    prepare = partial(sides.split.init_forward_metadata, sides.step)
    meters["metadata"] = of_slowest(group, wall_meter(prepare, device))
    times = interleave(meters, rounds, warm_up=1)
    ms = {name: times.median(name) / 1e3 for name in meters}
    saved = times.added("at once", to="split") / 1e3
    hidden = min(max(saved / ms["travel"], 0.0), 1.0) if ms["travel"] else 0.0
    speedup = times.ratio("alone", "split")
    return (
        *(count, ms["alone"], ms["split"], speedup, ms["at once"], ms["travel"], hidden),
        ms["metadata"],
    )


def write_profile(sides: Sides, count: int, path: Path) -> str:
    """Trace a split run of `count` layers on the first rank. Returns what the trace says."""
    group, run = sides.group, in_turn(sides.calls(sides.split)[:count])
    run()
    is_cuda = group.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * is_cuda]
    with profile(activities=activities) if group.rank == 0 else nullcontext() as found:
        group.all_reduce(torch.zeros(1, device=group.device))
        run()
        wait(group.device)
    if found is None:
        return ""
    found.export_chrome_trace(str(path))
    kernels = [
        (event.name, (event.time_range.start, event.time_range.end))
        for event in found.events()
        if event.device_type.name == "CUDA"
    ]
    # The first is that of the barrier
    travels = sorted(span for name, span in kernels if "nccl" in name.lower())[1:]
    total = sum(end - start for start, end in travels)
    if not total:
        return f"{path}: no kernels of communication, since this is no GPU"
    others = [span for name, span in kernels if "nccl" not in name.lower()]
    share = covered(travels, others) / total
    return f"{path}: other kernels run during {share:.0%} of {total / 1e3:.2f} ms of communication"


def covered(spans: Iterable[tuple[float, float]], others: Sequence[tuple[float, float]]) -> float:
    """How much of the spans (start, end) lies in any of the others."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(others):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return sum(
        max(0.0, min(end, last) - max(start, first))
        for start, end in spans
        for first, last in merged
    )


@contextmanager
def rows_on(
    group: RankGroup, about: dict[str, object], path: Path | None, title: str
) -> Iterator[Callable[..., None]]:
    """Adds a row to the first rank's report; other ranks print nothing."""
    if group.rank:
        yield lambda *cells: None
        return
    with Report(COLUMNS, about, path, title=title) as report:
        yield report.add


@click.command(context_settings={"show_default": True})
@click.option("--backend", default="", help="Its name. [default: the solver's choice]")
@click.option("--tokens", type=click.IntRange(1), default=131_072, help="Of the prompt.")
@click.option("--layers", type=click.IntRange(1), default=8, help="Of the longer row.")
@click.option("--dtype", default="bfloat16")
@click.option("--lanes", type=click.IntRange(1), default=8, help="Backends of parts.")
@click.option(
    "--chunks-at-once",
    type=click.IntRange(1),
    help="That travel in one round. [default: as many as there are ranks]",
)
@click.option(
    "--profile", "trace", type=click.Path(path_type=Path), help="Write a trace to this file."
)
@rounds_option(5)
@json_option
def main(
    backend: str,
    tokens: int,
    layers: int,
    dtype: str,
    lanes: int,
    chunks_at_once: int | None,
    trace: Path | None,
    rounds: int,
    path: Path | None,
) -> None:
    """Print the time of one layer and of several, on one rank and on all."""
    has_gpu = torch.cuda.is_available()
    group = RankGroup.start("cuda" if has_gpu else "cpu", seconds=PATIENCE)
    platform = Plugins.load().detect().pick(None if has_gpu else "cpu")
    with torch.inference_mode():
        sides, names = make_sides(
            group,
            platform,
            backend=backend,
            tokens=tokens,
            layers=layers,
            dtype=dtype,
            lanes=lanes,
            chunks_at_once=chunks_at_once,
        )
        error = sides.error()
        title = f"{tokens} tokens, {dtype}, {group.size} ranks, {names}; medians of {rounds} rounds"
        about = facts(group.device, "attnmux-core", ranks=group.size)
        with rows_on(group, about, path, title) as add:
            for count in dict.fromkeys((1, layers)):
                add(*measure(sides, count, rounds), error)
        if trace is not None:
            said = write_profile(sides, layers, trace)
            if said:
                click.echo(said)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
