"""Cost of the canary: decode steps with one compared with the same steps without.

    python -m benchmarks.canary [--rounds 15] [--share 0.01] [--json FILE]

without   microseconds of a decode step, metadata and all layers, on torch_native
unchecked what a step that is not checked adds, around a backend that does nothing
checked   what a checked step adds
cost      (1 - share) * unchecked + share * checked, as a part of `without`. Bar: 1 % at 0.01.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import click
import torch
from benchmarks.cases import Case, decode, json_option, only_option, rounds_option
from benchmarks.contract import Nothing

from attnmux.core import AttentionBackend, Platform
from attnmux.cpu.torch_native import TorchNativeBackend
from attnmux.testing import CanaryBackend
from attnmux.testing.bench import Report, facts, interleave
from attnmux.testing.bench.timing import Meter, wall_meter

CPU = torch.device("cpu")
MAX_COST = 0.01
LAYERS = 8
CASES = (
    decode(1, 1024, dtype="float32"),
    decode(8, 1024, dtype="float32"),
    decode(32, 1024, dtype="float32"),
    decode(8, 1024),
)
COLUMNS = {
    "workload": "",
    "without, us": ".0f",
    "unchecked, us": ".1f",
    "checked, us": ".0f",
    "cost": ".2%",
    "bar": "",
}


def measure(case: Case, rounds: int, share: float, report: Report) -> None:
    step = case.step(CPU, LAYERS)
    platform = Platform.parse("cpu:x86_64")

    def run(backend: AttentionBackend) -> None:
        backend.init_forward_metadata(step.batch)
        for call in step.calls(backend):
            call()

    def meter(backend: AttentionBackend, repeats: int = 1) -> Meter:
        return wall_meter(partial(run, backend), CPU, repeats=repeats)

    native, nothing = (
        partial(each, step.context(platform)) for each in (TorchNativeBackend, Nothing)
    )
    meters = {
        "without": meter(native()),
        "checked": meter(CanaryBackend(native(), share=1)),
        "nothing": meter(nothing(), 50),
        "unchecked": meter(CanaryBackend(nothing(), share=0), 50),
    }
    times = interleave(meters, rounds, warm_up=2)
    without = times.median("without")
    unchecked, checked = times.added("unchecked", "nothing"), times.added("checked", "without")
    cost = ((1 - share) * unchecked + share * checked) / without
    kept = cost <= MAX_COST
    word = "kept" if kept else "MISSED"
    report.add(str(case), without, unchecked, checked, cost, word, missed=not kept)


@click.command()
@rounds_option(15)
@click.option("--share", type=click.FloatRange(0, 1), default=0.01, show_default=True)
@only_option
@json_option
def main(rounds: int, share: float, only: str, path: Path | None) -> None:
    """Print the cost of checking a share of decode steps on the CPU."""
    title = f"{LAYERS} layers, share {share:g}, medians of {rounds} rounds"
    with Report(COLUMNS, facts(CPU, "attnmux-core"), path, title=title) as report:
        for case in CASES:
            if only in str(case):
                measure(case, rounds, share, report)


if __name__ == "__main__":
    main()
