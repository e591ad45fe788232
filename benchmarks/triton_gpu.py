"""The Triton backend against the libraries that are written for one vendor's GPUs.

    python -m benchmarks.triton_gpu [--only FAMILY]... [--ours-only] [--rounds 3] [--json FILE]
    TRITON_INTERPRET=1 python -m benchmarks.triton_gpu --dry-run      tiny sizes on the CPU

Time of one layer's attention over scattered pages, in us: ours through `forward_decode` and
`forward_extend` of a backend that the card's factory made, theirs called by hand. What a step
prepares once (metadata, plans) is outside; K and V are in the pool. Every output is compared with
float64 on sampled queries, and with ours as a whole, before it is timed.

decode, mla   One CUDA graph of layers with K and V of their own, at least 256 MB in all.
fp8, fp4      As decode, with our own bfloat16 over as many tokens: the bars are against that.
extend        Single calls, the cache flushed between them; extend fp8 against our own bfloat16.
turns         As extend, with few new tokens behind long prefixes; turns fp8 against our own
              bfloat16.

`ratio` is ours by the best of the others'. A figure is the median of rounds in which the sides take
turns, each round the median of Triton's `do_bench`.
"""

from __future__ import annotations

import gc
import importlib
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
import triton
from benchmarks import libraries
from benchmarks.cases import Case, dry_run_option, json_option, rounds_option
from benchmarks.emulated import emulated_libraries
from benchmarks.triton_table import (
    CASES,
    COLUMNS,
    FAMILIES,
    NARROW,
    OUR_BF16,
    OURS,
    PEERS,
    TINY,
    Figure,
    Row,
    notes,
)
from triton.testing import do_bench

from attnmux.core import AttentionCall, AttnmuxError, Platform
from attnmux.testing import distance, find_candidate
from attnmux.testing.bench import (
    Ceilings,
    Report,
    Step,
    ceilings,
    error_of,
    facts,
    graphs_of,
    in_graph,
    in_turn,
    interleave,
    max_error,
    wall_meter,
)
from attnmux.testing.bench.timing import Meter, Run


class Benchmark:
    """Measures workloads with the peers that are installed."""

    def __init__(self, *, rounds: int, ours_only: bool, dry_run: bool) -> None:
        self.device = torch.device("cpu" if dry_run else "cuda")
        self.platform = _platform(dry_run=dry_run)
        self.rounds = rounds
        self.missing: dict[str, str] = {}
        self._libraries: dict[str, Any] = {}
        for peer, (module, _) in PEERS.items() if not ours_only else ():
            try:
                self._libraries[peer] = importlib.import_module(module)
            except Exception as error:  # an installed library may still not load
                self.missing[peer] = AttnmuxError.in_brief(error)

    def measure(self, family: str, case: Case) -> Row:
        is_extend = case.workload.phase != "decode"
        # A layer alone is timed with a flushed cache, several with K and V of their own
        step = case.step(self.device, num_layers=1 if is_extend else None)
        meters: dict[str, Meter] = {}
        figures: dict[str, Figure] = {}

        def admit(
            name: str,
            make: Callable[[Step], list[Run]],
            step: Step,
            whole: torch.Tensor | None = None,
        ) -> torch.Tensor | None:
            found = admitted(lambda: make(step), step, whole, alone=is_extend)
            figures[name] = found.figure
            if found.run is not None:
                meters[name] = cold_meter(found.run, self.device)
            return found.out

        began = time.perf_counter()
        whole = admit(OURS, self.ours, step)
        ready = time.perf_counter() - began
        if any(word in family for word in NARROW):
            bf16 = replace(case, kv_dtype=case.dtype)
            admit(OUR_BF16, self.ours, bf16.step(self.device, num_layers=1 if is_extend else None))
        for peer, library in self._libraries.items():
            _, calls = PEERS[peer]
            if family in calls:
                admit(peer, partial(calls[family], library), step, whole)
        times = interleave(meters, self.rounds)
        for name in meters:
            figures[name] = replace(figures[name], us=times.median(name) / len(step.layers))
        return Row(
            family=family,
            workload=str(case),
            layers=len(step.layers),
            ready_s=ready,
            figures=figures,
            kv_bytes=case.kv_bytes,
            flops=case.workload.flops(case.request),
        )

    def ours(self, step: Step) -> list[Run]:
        """Each layer's call; the backend and the step's metadata are made here, once."""
        candidate = find_candidate("triton/triton", platforms=(self.platform,))
        context = step.context(self.platform)
        backend, batch = candidate.build(context), step.batch
        backend.init_forward_metadata(batch)
        is_decode = step.workload.phase == "decode"
        attend = backend.forward_decode if is_decode else backend.forward_extend
        calls = [
            AttentionCall(step.q, None, None, layer, False, q_rope=step.q_rope, out=step.out)
            for layer in step.layers
        ]
        return [partial(attend, call, batch) for call in calls]


@dataclass(frozen=True, kw_only=True, slots=True)
class Admitted:
    """A side after its answer was checked."""

    figure: Figure
    run: Run | None = None
    """None: the answer is wrong, or there is none."""
    out: torch.Tensor | None = None
    """[T, Hq, Dv] of the first layer."""


def admitted(
    make: Callable[[], list[Run]], step: Step, whole: torch.Tensor | None, *, alone: bool
) -> Admitted:
    """Check a side's answer, and make its run: the first layer's call alone, or a graph of all.

    whole: another side's output, [T, Hq, Dv], to compare with.
    """
    try:
        calls = make()
        out = libraries.answer(calls[0]).view(step.out.shape).clone()
        error = error_of(step, out, layer=0)
        if whole is not None:
            error = max(error, distance(out.float(), whole.float()))
        if error > max_error(step):
            return Admitted(figure=Figure(error=error))
        run = calls[0] if alone else in_graph(in_turn(calls), graphs_of(step.q.device))
        return Admitted(figure=Figure(error=error), run=run, out=out)
    except Exception as error:  # whatever a library raises is its result here
        return Admitted(figure=Figure(failure=AttnmuxError.in_brief(error)))


def cold_meter(run: Run, device: torch.device) -> Meter:
    """Median device time of one run, the cache flushed before each."""
    if device.type != "cuda":
        return wall_meter(run, device)
    return lambda: float(do_bench(run, warmup=20, rep=60, return_mode="median")) * 1e3


def _platform(*, dry_run: bool) -> Platform:
    """Of the device that torch drives."""
    if dry_run:
        return Platform.parse("nvidia:sm90")
    if torch.version.hip is not None:
        name = torch.cuda.get_device_properties(0).gcnArchName.split(":")[0]
        return Platform.parse(f"amd:{name}")
    major, minor = torch.cuda.get_device_capability()
    return Platform.parse(f"nvidia:sm{major}{minor},cuda={torch.version.cuda}")


@click.command()
@click.option("--only", multiple=True, type=click.Choice(FAMILIES), help="Default: all.")
@click.option("--ours-only", is_flag=True, help="Without the libraries.")
@rounds_option(3)
@json_option
@dry_run_option("Tiny sizes, interpreted")
def main(
    only: tuple[str, ...], ours_only: bool, rounds: int, path: Path | None, dry_run: bool
) -> None:
    """Print each family's table, its ratios and whether its bars are kept."""
    if dry_run and not triton.knobs.runtime.interpret:
        raise click.UsageError("--dry-run runs kernels in Triton's interpreter: TRITON_INTERPRET=1")
    with torch.no_grad(), emulated_libraries() if dry_run else nullcontext():
        benchmark = Benchmark(rounds=rounds, ours_only=ours_only, dry_run=dry_run)
        reached = Ceilings(read_gbs=0, matmul_tflops=0)
        if not dry_run:
            reached = ceilings(benchmark.device, torch.bfloat16, 0.3)
        about = facts(
            benchmark.device,
            *("triton", "flashinfer-python", "sglang-kernel"),
            platform=str(benchmark.platform),
            missing=benchmark.missing,
            ceilings=asdict(reached),
        )
        title = (
            f"{reached.read_gbs:.0f} GB/s and {reached.matmul_tflops:.0f} TFLOP/s measured; "
            f"medians of {rounds} rounds, us of a layer"
        )
        rows: list[Row] = []
        with Report(COLUMNS, about, path, title=title) as report:
            for name, reason in benchmark.missing.items():
                report.note(f"missing: {name}: {reason}")
            for family in only or FAMILIES:
                for case in (TINY if dry_run else CASES)[family]:
                    row = benchmark.measure(family, case)
                    gc.collect()
                    rows.append(row)
                    report.add(*row.cells(), record={**asdict(row), "ratio": row.ratio})
        for text in notes(rows, has_bars=not dry_run):
            report.note(text)


if __name__ == "__main__":
    main()
