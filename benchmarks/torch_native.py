"""torch_native against a loop that gathers each request's K and V and calls torch's SDPA.

    python -m benchmarks.torch_native [--rounds 9] [--threads N] [--only TEXT] [--json FILE]

Both sides take turns in one process, over the same scattered pages. A figure is the median of the
rounds, a ratio the median of the rounds' ratios. Times are of one layer's attention with K and V in
the pool; `metadata` is the cost of a step, whatever the number of layers. GB/s counts the K and V
that a layer has to read, and is compared with the rate at which this CPU reads a large buffer.
"""

from __future__ import annotations

import platform
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

from attnmux.bench import Report, Step, Workload, ceilings, facts, in_turn, interleave, wall_meter
from attnmux.core import LayerSpec, Platform
from attnmux.testing import find_candidate

CPU = torch.device("cpu")
PLATFORM = Platform.parse(f"cpu:{platform.machine()}")
UNEVEN = Workload.uneven(int(length) for length in torch.linspace(16, 4096, 16))

CASES = (
    # The two that are quoted, a grid, uneven lengths, a prefill
    *(decode(16, 2048, page_size=page) for page in (1, 16)),
    *(
        decode(batch, ctx)
        for ctx in (128, 2048)
        for batch in (1, 4, 16, 64)
        if (ctx, batch) != (2048, 16)
    ),
    Case(workload=UNEVEN),
    extend(1, 2048),
)
COLUMNS = {
    "workload": "",
    "baseline ms": ".2f",
    "ours ms": ".2f",
    "metadata ms": ".2f",
    "tokens/s": ",.0f",
    "GB/s": ".2f",
    "of read bandwidth": ".0%",
    "times baseline": ".1f",
}


def gather_and_attend(step: Step, layer: LayerSpec) -> torch.Tensor:
    """[T, Hq, D]: one layer by a loop over requests."""
    keys, values = step.pool.get_kv_buffer(layer.layer_id)
    table, new = step.table.req_to_token, step.workload.new
    out = torch.empty_like(step.q)
    rows = zip(step.batch.req_pool_indices.tolist(), step.workload.lengths, strict=True)
    for request, (row, length) in enumerate(rows):
        slots = table[row, :length]
        tokens = slice(request * new, (request + 1) * new)
        attended = torch.nn.functional.scaled_dot_product_attention(
            step.q[tokens].transpose(0, 1).unsqueeze(0),
            keys[slots].transpose(0, 1).unsqueeze(0),
            values[slots].transpose(0, 1).unsqueeze(0),
            scale=layer.scaling,
            is_causal=new > 1,
            enable_gqa=True,
        )
        out[tokens] = attended.squeeze(0).transpose(0, 1)
    return out


def measure(case: Case, rounds: int, read_gbs: float, report: Report) -> None:
    step = case.step(CPU)
    backend = find_candidate("cpu/torch_native", platforms=(PLATFORM,)).build(
        step.context(PLATFORM)
    )
    backend.init_forward_metadata(step.batch)
    calls = step.calls_in_pool(backend)
    for layer, call in zip(step.layers, calls, strict=True):
        torch.testing.assert_close(call(), gather_and_attend(step, layer), atol=2e-2, rtol=2e-2)
    times = interleave(
        {
            "baseline": wall_meter(
                lambda: [gather_and_attend(step, layer) for layer in step.layers], CPU
            ),
            "metadata": wall_meter(lambda: backend.init_forward_metadata(step.batch), CPU),
            "ours": wall_meter(in_turn(calls), CPU, repeats=3),
        },
        rounds,
    )
    layers = len(step.layers)
    ours = times.median("ours") / layers
    # A prefill is bound by arithmetic: its reads say nothing
    rate = case.kv_bytes / ours / 1e3 if case.is_decode else None
    report.add(
        str(case),
        times.median("baseline") / layers / 1e3,
        ours / 1e3,
        times.median("metadata") / 1e3,
        case.workload.num_tokens / ours * 1e6,
        rate,
        None if rate is None else rate / read_gbs,
        times.ratio("baseline", "ours"),
    )


@click.command()
@rounds_option(9)
@threads_option
@only_option
@json_option
def main(rounds: int, only: str, path: Path | None) -> None:
    """Print how many times as fast torch_native is as a gather and SDPA, on a CPU."""
    read = ceilings(CPU, torch.float32, 0.3).read_gbs
    about = facts(CPU, read_gbs=read)
    title = (
        f"32/8 heads x 128, bfloat16; medians of {rounds} rounds; this CPU reads {read:.1f} GB/s."
    )
    with Report(COLUMNS, about, path, title=title) as report:
        for case in CASES:
            if only in str(case):
                measure(case, rounds, read, report)


if __name__ == "__main__":
    main()
