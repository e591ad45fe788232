"""`native` against what this CPU reaches on the same work, and against `torch_native`.

    python -m benchmarks.native [--rounds 9] [--threads N] [--only TEXT] [--json FILE]

Every side takes its turn in each round: the backends' layers, a sum over as many bytes as K and V
have, in huge pages as pools are, and square products in float32 and in the case's dtype. The bound
of a case is the longer of two times: that of reading its bytes, and that of its products at the
faster square product's rate.
Times are of the CPU, of all threads together, so that other work on the machine counts little; a
figure is the median of the rounds. `step` is the preparation of a step, whatever its layers.
"""

from __future__ import annotations

import time
from functools import partial
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

from attnmux.core import AttentionBackend, Platform, torch_dtype
from attnmux.core.contract.memory import zeros
from attnmux.core.find.cpu import probe_cpu
from attnmux.testing import find_candidate
from attnmux.testing.bench import Report, facts, in_turn, interleave
from attnmux.testing.bench.timing import Meter, Run

CPU = torch.device("cpu")
SIDE = 1024
"""Of the product. It takes about as long as a layer, and fits into the second cache in part."""
MOST_BASELINE_PAIRS = 1 << 19
"""Of a token and a key: torch_native is left out of longer cases, which take it minutes."""

CASES = (
    *(decode(batch, ctx) for batch in (1, 16) for ctx in (2048, 8192)),
    decode(16, 2048, page_size=1),
    *(decode(16, 2048, q_heads=heads, kv_heads=8) for heads in (8, 64)),
    decode(4, 2048, kind="mla", q_heads=16, kv_heads=1),
    extend(1, 2048),
)
COLUMNS = {
    "workload": "",
    "native ms": ".2f",
    "step ms": ".2f",
    "reads ms": ".2f",
    "products ms": ".2f",
    "of bound": ".0%",
    "torch_native ms": ".1f",
    "times torch_native": ".1f",
}


def cpu_meter(run: Run) -> Meter:
    """Microseconds of CPU time of one run."""

    def measure() -> float:
        start = time.process_time()
        run()
        return (time.process_time() - start) * 1e6

    return measure


def measure(case: Case, rounds: int, here: Platform, report: Report) -> None:
    step = case.step(CPU)
    num_layers = len(step.layers)

    def built(name: str) -> AttentionBackend:
        backend = find_candidate(f"cpu/{name}", platforms=(here,)).build(step.context(here))
        backend.init_forward_metadata(step.batch)
        return backend

    native = built("native")
    run = in_turn(step.calls_in_pool(native))
    run()
    read = zeros((case.kv_bytes // 4,), dtype=torch.float32, device=CPU).fill_(1)
    wide = torch.randn(2, SIDE, SIDE)
    products = {dtype: wide.to(dtype) for dtype in (torch.float32, torch_dtype(case.dtype))}
    meters = {
        "native": cpu_meter(run),
        "step": cpu_meter(partial(native.init_forward_metadata, step.batch)),
        "read": cpu_meter(partial(torch.sum, read)),
        **{str(dtype): cpu_meter(partial(torch.matmul, *pair)) for dtype, pair in products.items()},
    }
    has_baseline = case.workload.num_tokens * case.workload.keys <= MOST_BASELINE_PAIRS
    if has_baseline:
        meters["torch_native"] = cpu_meter(in_turn(step.calls_in_pool(built("torch_native"))[:1]))
    times = interleave(meters, rounds, warm_up=1)
    native_us, read_us = times.median("native") / num_layers, times.median("read")
    fastest = min(times.median(str(dtype)) for dtype in products)
    products_us = fastest * case.workload.flops(case.request) / (2 * SIDE**3)
    report.add(
        str(case),
        native_us / 1e3,
        times.median("step") / 1e3,
        read_us / 1e3,
        products_us / 1e3,
        max(read_us, products_us) / native_us,
        times.median("torch_native") / 1e3 if has_baseline else None,
        times.ratio("torch_native", "native") * num_layers if has_baseline else None,
    )


@click.command()
@rounds_option(9)
@threads_option
@only_option
@json_option
def main(rounds: int, only: str, path: Path | None) -> None:
    """Print how close `native` comes to this CPU's bound."""
    title = f"{torch.get_num_threads()} threads, heads of 128, bfloat16; medians of {rounds} rounds"
    with Report(COLUMNS, facts(CPU), path, title=title) as report:
        for case in CASES:
            if only in str(case):
                measure(case, rounds, probe_cpu(), report)


if __name__ == "__main__":
    main()
