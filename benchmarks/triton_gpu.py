"""The Triton backend beside the libraries that are written for one vendor's GPUs.

    python -m benchmarks.triton_gpu [--only FAMILY]... [--ours-only] [--rounds 3] [--json FILE]
    TRITON_INTERPRET=1 python -m benchmarks.triton_gpu --dry-run      tiny sizes on the CPU

Time of one layer's attention over scattered pages, in us: ours through `forward_decode` and
`forward_extend` of a backend that the factory made, theirs called by hand. What a step prepares
once (metadata, plans) is outside; K and V are in the pool. Every output is compared with float32 on
sampled queries, and with ours as a whole, before it is timed.

decode, mla   One CUDA graph of layers with K and V of their own, 256 MB in all at least.
fp8           As decode, our own bfloat16 over the same tokens beside it: its bar is against that.
extend        Single calls, the cache flushed between them.

`ratio` is ours by the best of the others'. A figure is the median of rounds, each the median of
Triton's `do_bench`, the sides by turns.
"""

from __future__ import annotations

import gc
import importlib.metadata
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
import triton
from benchmarks.peers import PEERS, Peer
from benchmarks.timing import Call
from benchmarks.triton_rows import BARS, OUR_BF16, OURS, Row, line, summary
from benchmarks.triton_setups import Setup, make_setup
from benchmarks.triton_sides import (
    MOST_ERROR,
    Figure,
    Run,
    admitted,
    ceilings,
    ours,
    output,
    times,
)
from benchmarks.triton_workloads import TINY, WORKLOADS, Workload

from attnmux.core.choosing.machine.platform import Platform
from attnmux.core.errors import in_brief


class Benchmark:
    """Measures workloads with those peers that are here."""

    def __init__(self, *, rounds: int, ours_only: bool, dry_run: bool) -> None:
        self.device = torch.device("cpu" if dry_run else "cuda")
        self.platform = _platform(dry_run=dry_run)
        self.rounds = rounds
        self.missing: dict[str, str] = {}
        self._libraries: dict[str, Any] = {}
        for peer in () if ours_only else PEERS:
            try:
                self._libraries[peer.name] = peer.load(emulated=dry_run)
            except Exception as error:  # a library that is here may still not load
                self.missing[peer.name] = in_brief(error)

    def sides(self, family: str) -> list[str]:
        """The columns of a family's table."""
        own = [OURS, OUR_BF16] if family == "fp8" else [OURS]
        return own + [peer.name for peer in self._peers(family)]

    def measure(self, workload: Workload) -> Row:
        setup = make_setup(workload, self.platform, self.device)
        whole: torch.Tensor | None = None
        runs: dict[str, Run] = {}
        figures: dict[str, Figure] = {}

        def admit(name: str, make: Callable[[Setup], list[Call]], given: Setup) -> None:
            run, figures[name] = admitted(partial(make, given), given, whole)
            if run is not None:
                runs[name] = run

        began = time.perf_counter()
        admit(OURS, ours, setup)
        ready = time.perf_counter() - began
        if workload.family == "fp8":
            wide = replace(workload, kv_dtype=workload.dtype)
            admit(OUR_BF16, ours, make_setup(wide, self.platform, self.device))
        if OURS in runs:
            whole = output(runs[OURS].first, setup)
        for peer in self._peers(workload.family):
            make = partial(peer.calls[workload.family], self._libraries[peer.name])
            admit(peer.name, make, setup)
        for name, us in times(runs, self.rounds, self.device).items():
            figures[name] = replace(figures[name], us=us)
        return Row(
            family=workload.family,
            workload=str(workload),
            layers=len(setup.context.layers),
            ready_s=ready,
            figures=figures,
            kv_bytes=workload.kv_bytes,
            flops=workload.flops,
        )

    def facts(self) -> dict[str, Any]:
        """The machine and the versions that the figures belong to."""
        is_cpu = self.device.type == "cpu"
        return {
            "device": "cpu, interpreted" if is_cpu else torch.cuda.get_device_name(),
            "platform": str(self.platform),
            "machine": platform.platform(),
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "triton": triton.__version__,
                **{peer.distribution: _version(peer) for peer in PEERS},
            },
            "missing": self.missing,
            "ceilings": ceilings(self.device),
        }

    def _peers(self, family: str) -> list[Peer]:
        return [peer for peer in PEERS if peer.name in self._libraries and family in peer.calls]


def _platform(*, dry_run: bool) -> Platform:
    """Of the device that torch drives."""
    if dry_run:
        return Platform.parse("nvidia:sm90")
    if torch.version.hip is not None:
        name = torch.cuda.get_device_properties(0).gcnArchName.split(":")[0]
        return Platform.parse(f"amd:{name}")
    major, minor = torch.cuda.get_device_capability()
    return Platform.parse(f"nvidia:sm{major}{minor},cuda={torch.version.cuda}")


def _version(peer: Peer) -> str:
    try:
        return importlib.metadata.version(peer.distribution)
    except importlib.metadata.PackageNotFoundError:  # or unpacked without its metadata
        loaded = sys.modules.get(peer.module.partition(".")[0])
        return str(vars(loaded).get("__version__", "unknown")) if loaded else "not installed"


def show(benchmark: Benchmark, family: str, workloads: list[Workload]) -> Iterator[Row]:
    """A family's table, row by row as they are measured."""
    sides, has_bars = benchmark.sides(family), benchmark.device.type != "cpu"
    heads = ["workload", "layers", *sides, "best", "ratio", "TB/s", "TFLOP/s", "error"]
    click.echo(f"\n### {family}\n\n| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
    rows, notes = [], []
    for workload in workloads:
        row = benchmark.measure(workload)
        gc.collect()
        rows.append(row)
        click.echo(line(row, sides))
        for name, figure in row.figures.items():
            if figure.us is None:
                why = figure.failure or f"WRONG: off by {figure.error:.1e}, at most {MOST_ERROR}"
                notes.append(f"- {row.workload}, {name}: {why}")
        yield row
    ready = max(row.ready_s for row in rows)
    click.echo(
        "\n".join(
            [
                "",
                *notes,
                summary(family, rows, has_bars=has_bars),
                f"ours ready after {ready:.1f} s at most",
            ]
        )
    )


@click.command()
@click.option("--only", multiple=True, type=click.Choice([*BARS]), help="Default: all.")
@click.option("--ours-only", is_flag=True, help="Without the libraries.")
@click.option("--rounds", default=3, show_default=True, help="Rounds of each workload.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write the figures here too.")
@click.option("--dry-run", is_flag=True, help="Tiny sizes, interpreted: figures mean nothing.")
def main(
    only: tuple[str, ...], ours_only: bool, rounds: int, path: Path | None, dry_run: bool
) -> None:
    """Print each family's table, its ratios and whether its bars are kept."""
    if dry_run and not triton.knobs.runtime.interpret:
        raise click.UsageError("--dry-run runs kernels in Triton's interpreter: TRITON_INTERPRET=1")
    torch.manual_seed(0)
    benchmark = Benchmark(rounds=rounds, ours_only=ours_only, dry_run=dry_run)
    facts = benchmark.facts()
    said = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    reached = ", ".join(f"{name} {figure:.2f}" for name, figure in facts["ceilings"].items())
    click.echo(f"{facts['device']} ({facts['platform']}), {said}; {facts['machine']}")
    click.echo(f"ceilings: {reached}; medians of {rounds} rounds, us of a layer")
    for name, reason in facts["missing"].items():
        click.echo(f"missing: {name}: {reason}")
    rows: list[Row] = []
    with torch.no_grad():
        for family in only or BARS:
            workloads = [each for each in (TINY if dry_run else WORKLOADS) if each.family == family]
            for row in show(benchmark, family, workloads):
                rows.append(row)
                if path is not None:  # after each, so that nothing is lost by a time limit
                    path.write_text(json.dumps(_data(facts, rows), indent=1), encoding="utf-8")


def _data(facts: dict[str, Any], rows: list[Row]) -> dict[str, Any]:
    return {**facts, "rows": [{**asdict(row), "ratio": row.ratio} for row in rows]}


if __name__ == "__main__":
    main()
