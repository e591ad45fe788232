"""A backend of attnmux-cpu against its baseline, over the same scattered pages.

    python -m benchmarks.cpu torch_native [--rounds 9] [--threads N] [--only TEXT] [--json FILE]
    python -m benchmarks.cpu flex_attention [...]

The baseline of torch_native is a loop that gathers each request's K and V and calls torch's SDPA;
that of flex_attention is torch_native. Both sides take turns in one process. A figure is the median
of the rounds, a ratio the median of the rounds' ratios. Times are of one layer's attention with K
and V in the pool; `metadata` is the cost of a step, whatever the number of layers. GB/s counts the
K and V that a decode layer has to read, and is compared with the rate at which this CPU reads a
large buffer. `compile` is the time until a backend has answered first: kernels are compiled before
the first round, unless Inductor's cache on disk has them.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
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

from attnmux.core import LayerSpec, Platform
from attnmux.testing import find_candidate
from attnmux.testing.bench import (
    Report,
    Step,
    Workload,
    ceilings,
    facts,
    in_turn,
    interleave,
    wall_meter,
)
from attnmux.testing.bench.timing import Run

CPU = torch.device("cpu")
PLATFORM = Platform.parse(f"cpu:{platform.machine()}")
UNEVEN = Workload.uneven(int(length) for length in torch.linspace(16, 4096, 16))

CASES = {
    # The two that are quoted, a grid, uneven lengths, a prefill
    "torch_native": (
        *(decode(16, 2048, page_size=page) for page in (1, 16)),
        *(
            decode(batch, ctx)
            for ctx in (128, 2048)
            for batch in (1, 4, 16, 64)
            if (ctx, batch) != (2048, 16)
        ),
        Case(workload=UNEVEN),
        extend(1, 2048),
    ),
    # Page sizes that are blocks, and one that is not
    "flex_attention": (
        *(decode(16, 2048, page_size=page) for page in (1, 16, 64, 128)),
        *(
            decode(batch, ctx, page_size=64)
            for ctx, batch in ((128, 1), (128, 16), (2048, 1), (2048, 4), (8192, 4))
        ),
        Case(workload=UNEVEN, page_size=64),
        *(extend(1, 2048, page_size=page) for page in (1, 16, 64)),
        extend(4, 128, 1920, page_size=64),
    ),
}
COLUMNS = {
    "workload": "",
    "baseline ms": ".2f",
    "ours ms": ".2f",
    "metadata ms": ".2f",
    "tokens/s": ",.0f",
    "GB/s": ".2f",
    "of read bandwidth": ".0%",
    "compile s": ".1f",
    "times baseline": ".2f",
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


def prepared(name: str, step: Step) -> tuple[Run, Sequence[Run]]:
    """What a backend does once a step, which it has done, and each layer's call."""
    candidate = find_candidate(f"cpu/{name}", platforms=(PLATFORM,))
    backend = candidate.build(step.context(PLATFORM))
    prepare = partial(backend.init_forward_metadata, step.batch)
    prepare()
    return prepare, step.calls_in_pool(backend)


def measure(name: str, case: Case, rounds: int, read_gbs: float, report: Report) -> None:
    step, answers = case.step(CPU), list[object]()
    baseline: Sequence[Run] = [partial(gather_and_attend, step, layer) for layer in step.layers]
    if name != "torch_native":
        _, baseline = prepared("torch_native", step)

    def answer() -> None:
        answers.extend(call() for call in prepared(name, step)[1])

    compiling = wall_meter(answer, CPU)() / 1e6
    torch.testing.assert_close(answers, [call() for call in baseline], atol=2e-2, rtol=2e-2)
    prepare, ours = prepared(name, step)
    times = interleave(
        {
            "baseline": wall_meter(in_turn(baseline), CPU),
            "metadata": wall_meter(prepare, CPU),
            "ours": wall_meter(in_turn(ours), CPU, repeats=3),
        },
        rounds,
    )
    layer_us = times.median("ours") / len(step.layers)
    # A prefill is bound by arithmetic: its reads say nothing
    rate = case.kv_bytes / layer_us / 1e3 if case.is_decode else None
    report.add(
        str(case),
        times.median("baseline") / len(step.layers) / 1e3,
        layer_us / 1e3,
        times.median("metadata") / 1e3,
        case.workload.num_tokens / layer_us * 1e6,
        rate,
        None if rate is None else rate / read_gbs,
        compiling,
        times.ratio("baseline", "ours"),
    )


@click.command()
@click.argument("name", type=click.Choice([*CASES]))
@rounds_option(9)
@threads_option
@only_option
@json_option
def main(name: str, rounds: int, only: str, path: Path | None) -> None:
    """Print how many times as fast a backend is as its baseline, on a CPU."""
    read = ceilings(CPU, torch.float32, 0.3).read_gbs
    title = (
        f"32/8 heads x 128, bfloat16; medians of {rounds} rounds; this CPU reads {read:.1f} GB/s."
    )
    with Report(COLUMNS, facts(CPU, read_gbs=read), path, title=title) as report:
        for case in CASES[name]:
            if only in str(case):
                measure(name, case, rounds, read, report)


if __name__ == "__main__":
    main()
