"""flex_attention against torch_native on a CPU, over the same pool.

    python -m benchmarks.flex_attention [--rounds 9] [--threads N] [--only TEXT] [--json FILE]

Both sides take turns in one process. A figure is the median of the rounds, a ratio the median of
the rounds' ratios. Times are of one layer's attention with K and V in the pool; `metadata` is the
cost of a step, whatever the number of layers. Kernels are compiled before the first round;
`compile` is the time that took, unless Inductor's cache on disk had them.
"""

from __future__ import annotations

from pathlib import Path

import click
import torch
from benchmarks.cases import (
    Case,
    decode,
    extend,
    json_option,
    only_option,
    rounds_option,
    threads_option,
)
from benchmarks.torch_native import CPU, PLATFORM, UNEVEN

from attnmux.bench import Report, facts, in_turn, interleave, wall_meter
from attnmux.core import AttentionBackend
from attnmux.testing import find_candidate

SIDES = ("torch_native", "flex_attention")
CASES = (
    # Page sizes that are blocks, and one that is not
    *(decode(16, 2048, page_size=page) for page in (1, 16, 64, 128)),
    *(
        decode(batch, ctx, page_size=64)
        for ctx, batch in ((128, 1), (128, 16), (2048, 1), (2048, 4), (8192, 4))
    ),
    Case(workload=UNEVEN, page_size=64),
    *(extend(1, 2048, page_size=page) for page in (1, 16, 64)),
    extend(4, 128, 1920, page_size=64),
)
COLUMNS = {
    "workload": "",
    **{f"{side} ms": ".2f" for side in SIDES},
    **{f"metadata, {side} ms": ".2f" for side in SIDES},
    "compile s": ".1f",
    "times torch_native": ".2f",
}


def measure(case: Case, rounds: int, report: Report) -> None:
    step = case.step(CPU)

    def make(side: str) -> AttentionBackend:
        candidate = find_candidate(f"cpu/{side}", platforms=(PLATFORM,))
        return candidate.build(step.context(PLATFORM))

    def answers(backend: AttentionBackend) -> list[object]:
        backend.init_forward_metadata(step.batch)
        return [call() for call in step.calls_in_pool(backend)]

    expected, compiled = answers(make(SIDES[0])), list[object]()
    compiling = wall_meter(lambda: compiled.extend(answers(make(SIDES[1]))), CPU)() / 1e6
    torch.testing.assert_close(compiled, expected, atol=2e-2, rtol=2e-2)
    meters = {}
    for side in SIDES:
        backend = make(side)
        backend.init_forward_metadata(step.batch)
        meters[side] = wall_meter(in_turn(step.calls_in_pool(backend)), CPU, repeats=3)
        meters[f"metadata, {side}"] = wall_meter(
            lambda backend=backend: backend.init_forward_metadata(step.batch),  # type: ignore[misc]  # bound now
            CPU,
        )
    times = interleave(meters, rounds)
    report.add(
        str(case),
        *(times.median(side) / len(step.layers) / 1e3 for side in SIDES),
        *(times.median(f"metadata, {side}") / 1e3 for side in SIDES),
        compiling,
        times.ratio(*SIDES),
    )


@click.command()
@rounds_option(9)
@threads_option
@only_option
@json_option
def main(rounds: int, only: str, path: Path | None) -> None:
    """Print how many times as fast flex_attention is as torch_native, on a CPU."""
    title = f"32/8 heads x 128, bfloat16; medians of {rounds} rounds."
    with Report(COLUMNS, facts(CPU), path, title=title) as report:
        for case in CASES:
            if only in str(case):
                measure(case, rounds, report)


if __name__ == "__main__":
    main()
