"""The kernel `linear` of attnmux-cpu against torch's linear layers.

    python -m benchmarks.native_linear [--rounds 9] [--threads N] [--only TEXT] [--json FILE]

Both sides take turns, with a sum over as many bytes as the weights have. Times are of the CPU, of
all threads together: medians of the rounds, and of their ratios. Weights are those of Qwen2.5-0.5B.
"""

from __future__ import annotations

from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import torch
from benchmarks.cases import json_option, only_option, rounds_option, threads_option
from benchmarks.native import CPU, cpu_meter

from attnmux.core.find.cpu import probe_cpu
from attnmux.cpu.native.linear import NativeLinear
from attnmux.testing.bench import Report, facts, interleave

WEIGHTS = ((4864, 896), (896, 4864), (151936, 896))
ROWS = (1, 2, 4, 8, 16, 64)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
COLUMNS = {
    "dtype, rows, weights": "",
    "linear ms": ".2f",
    "torch ms": ".2f",
    "reads ms": ".2f",
    "torch / linear": ".2f",
}


def measure(
    name: str, case: str, shape: tuple[int, int], num_rows: int, rounds: int, report: Report
) -> None:
    context: Any = SimpleNamespace(platform=probe_cpu())
    weight = torch.randn(shape).to(DTYPES[name])
    x = torch.randn(num_rows, shape[1]).to(DTYPES[name])
    read = torch.ones(weight.nbytes // 4)
    times = interleave(
        {
            "linear": cpu_meter(partial(NativeLinear(context), x, weight, None)),
            "torch": cpu_meter(partial(torch.nn.functional.linear, x, weight)),
            "reads": cpu_meter(partial(torch.sum, read)),
        },
        rounds,
        warm_up=1,
    )
    figures = (times.median(side) / 1e3 for side in ("linear", "torch", "reads"))
    report.add(case, *figures, times.ratio("torch", "linear"))


@click.command()
@rounds_option(9)
@threads_option
@only_option
@json_option
def main(rounds: int, only: str, path: Path | None) -> None:
    """Print how many times as fast the kernel is as torch."""
    title = f"{torch.get_num_threads()} threads; medians of {rounds} rounds"
    with Report(COLUMNS, facts(CPU), path, title=title) as report:
        for name, shape, num_rows in product(DTYPES, WEIGHTS, ROWS):
            case = f"{name}, {num_rows} x {shape[0]} x {shape[1]}"
            if only in case:
                measure(name, case, shape, num_rows, rounds, report)


if __name__ == "__main__":
    main()
