"""flex_attention against torch_native on a CPU, over the same pool.

    python -m benchmarks.flex_attention [--rounds 9] [--threads N] [--only TEXT]

Both run by turns in one process; a figure is the median of the rounds, a ratio the median of the
rounds' ratios. Times are of one layer's attention with K and V in the pool; `metadata` is what a
step costs once, whatever the number of layers. Kernels are compiled before the first round;
`compile` says how long the workload's took, unless Inductor's cache on disk had them.
"""

from __future__ import annotations

import platform
import statistics

import click
import torch
from benchmarks.torch_native import (
    DIM,
    DTYPE,
    KV_HEADS,
    LAYERS,
    Q_HEADS,
    Workload,
    make_batch,
    make_context,
    seconds,
)

from attnmux.core.backend import AttentionBackend
from attnmux.core.dtypes import dtype_name
from attnmux.cpu.flex_attention import FlexAttentionBackend
from attnmux.cpu.torch_native import TorchNativeBackend


def workloads() -> list[Workload]:
    """Decode and extend at the page sizes that are blocks, and at one that is not."""
    rows = [Workload(lens=(2048,) * 16, page_size=page) for page in (1, 16, 64, 128)]
    rows += [
        Workload(lens=(ctx,) * batch, page_size=64)
        for ctx, batch in ((128, 1), (128, 16), (2048, 1), (2048, 4), (8192, 4))
    ]
    uneven = tuple(int(length) for length in torch.linspace(16, 4096, 16))
    rows.append(Workload(lens=uneven, page_size=64, name="decode bs 16, ctx 16 to 4096"))
    rows += [
        Workload(lens=(2048,), page_size=page, new=2048, name="prefill of 2048")
        for page in (1, 16, 64)
    ]
    rows.append(Workload(lens=(2048,) * 4, page_size=64, new=128, name="extend 4 x 128 on 1920"))
    return rows


def measure(workload: Workload, rounds: int) -> tuple[str, ...]:
    """A row of the table."""
    context = make_context(workload)
    batch = make_batch(workload, context)
    q = torch.randn(workload.num_tokens, Q_HEADS, DIM).to(DTYPE)

    def layers(backend: AttentionBackend) -> list[torch.Tensor]:
        return [backend.forward(q, None, None, layer, batch) for layer in context.layers]

    def prepared(backend: AttentionBackend) -> list[torch.Tensor]:
        backend.init_forward_metadata(batch)
        return layers(backend)

    native = TorchNativeBackend(context)
    expected = prepared(native)
    results: list[list[torch.Tensor]] = []
    compiling = seconds(lambda: results.append(prepared(FlexAttentionBackend(context))))
    torch.testing.assert_close(results[0], expected, atol=2e-2, rtol=2e-2)
    flex = FlexAttentionBackend(context)
    flex.init_forward_metadata(batch)
    times: list[list[float]] = [[], [], [], []]
    for _ in range(rounds):
        times[0].append(seconds(lambda: layers(native), times=3) / LAYERS)
        times[1].append(seconds(lambda: layers(flex), times=3) / LAYERS)
        times[2].append(seconds(lambda: native.init_forward_metadata(batch)))
        times[3].append(seconds(lambda: flex.init_forward_metadata(batch)))
    ratio = statistics.median(a / b for a, b in zip(times[0], times[1], strict=True))
    medians = (f"{statistics.median(column) * 1e3:.2f}" for column in times)
    return (str(workload), *medians, f"{compiling:.1f}", f"{ratio:.2f}")


@click.command()
@click.option("--rounds", default=9, show_default=True, help="Rounds of each workload.")
@click.option("--threads", type=int, help="Threads of torch; its own choice by default.")
@click.option("--only", default="", help="Run the workloads whose name contains this.")
def main(rounds: int, threads: int | None, only: str) -> None:
    """Print the figures as a Markdown table."""
    if threads is not None:
        torch.set_num_threads(threads)
    torch.manual_seed(0)
    click.echo(
        f"{platform.platform()}, Python {platform.python_version()}, torch {torch.__version__}, "
        f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}; "
        f"{Q_HEADS}/{KV_HEADS} heads x {DIM}, {dtype_name(DTYPE)}; medians of {rounds} rounds.\n"
    )
    click.echo(
        "| workload | torch_native ms | flex_attention ms | metadata, torch_native ms "
        "| metadata, flex_attention ms | compile s | times torch_native |\n"
        "|---|---|---|---|---|---|---|"
    )
    for workload in workloads():
        if only in str(workload):
            click.echo(f"| {' | '.join(measure(workload, rounds))} |")


if __name__ == "__main__":
    main()
