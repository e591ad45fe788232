"""What index builders cost on a CPU, as a ratio to one random gather in the same run.

The gather, `req_to_token.view(-1)[idx]` with 2**20 random indices, reads as many slots as
256 requests of 4,096 tokens have. Bars: CSR indices at most 4 gathers, a page table at most 1.
Every round runs every builder once, so that a disturbance hits all alike; medians are printed.

    python benchmarks/indices.py [--threads N] [--rounds N]
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Mapping

import click
import torch
from rich.console import Console
from rich.table import Table

from attnmux.core.indices import kv_indices, kv_indptr, page_table, window_view

BATCH_SIZE = 256
CONTEXT = 4096
MAX_CONTEXT = 8192
NUM_ROWS = 512
GATHER = "gather of 2**20 slots"
WARMUP_ROUNDS = 5


def make_builders() -> dict[str, tuple[Callable[[], torch.Tensor], float | None]]:
    """Each builder by name, with its bar in gathers where it has one."""
    generator = torch.Generator().manual_seed(0)
    slots = torch.randperm(NUM_ROWS * MAX_CONTEXT, generator=generator)
    table = slots.to(torch.int32).view(NUM_ROWS, MAX_CONTEXT)
    rows = torch.randperm(NUM_ROWS - 1, generator=generator)[:BATCH_SIZE] + 1
    lens = torch.full((BATCH_SIZE,), CONTEXT, dtype=torch.int32)
    uneven = torch.randint(0, 2 * CONTEXT, (BATCH_SIZE,), generator=generator, dtype=torch.int32)
    random_cells = torch.randint(table.numel(), (2**20,), generator=generator)
    total = BATCH_SIZE * CONTEXT
    buffer = torch.empty(total, dtype=torch.int32)
    start = torch.full((BATCH_SIZE,), 64, dtype=torch.int32)

    def csr(kv_lens: torch.Tensor, page_size: int = 1) -> torch.Tensor:
        indptr = kv_indptr(kv_lens, page_size=page_size)
        return kv_indices(table, rows, indptr, page_size=page_size)

    def windowed() -> torch.Tensor:
        view = window_view(lens, 1023)
        return kv_indices(table, rows, kv_indptr(view.kv_lens), kv_start=view.kv_start)

    return {
        GATHER: (lambda: table.view(-1)[random_cells], None),
        "kv_indptr + kv_indices": (lambda: csr(lens), 4),
        "kv_indptr + kv_indices, lengths 0 to 8191": (lambda: csr(uneven), 4),
        "kv_indptr + kv_indices, page 16": (lambda: csr(lens, 16), None),
        "kv_indptr + kv_indices, window 1023": (windowed, None),
        "kv_indices into a graph's buffer": (
            lambda: kv_indices(table, rows, kv_indptr(lens), out=buffer),
            None,
        ),
        "page_table, page 1": (lambda: page_table(table, rows, lens), 1),
        "page_table, page 16": (lambda: page_table(table, rows, lens, page_size=16), 1),
        "page_table, page 1, kv_start": (
            lambda: page_table(table, rows, lens, kv_start=start, max_len=CONTEXT),
            None,
        ),
    }


def medians(builders: Mapping[str, Callable[[], torch.Tensor]], rounds: int) -> dict[str, float]:
    """Median seconds of each, over interleaved rounds."""
    seconds: dict[str, list[float]] = {name: [] for name in builders}
    for round_number in range(rounds + WARMUP_ROUNDS):
        for name, build in builders.items():
            begin = time.perf_counter()
            build()
            elapsed = time.perf_counter() - begin
            if round_number >= WARMUP_ROUNDS:
                seconds[name].append(elapsed)
    return {name: statistics.median(values) for name, values in seconds.items()}


def cpu_name() -> str:
    """The processor as the kernel names it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names = [line.partition(":")[2].strip() for line in lines if "model name" in line]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


@click.command(help=__doc__.partition("\n")[0])
@click.option("--threads", type=click.IntRange(1), help="torch's threads; its own choice if unset")
@click.option("--rounds", type=click.IntRange(1), default=50, show_default=True)
def main(threads: int | None, rounds: int) -> None:
    if threads is not None:
        torch.set_num_threads(threads)
    builders = make_builders()
    times = medians({name: build for name, (build, _) in builders.items()}, rounds)
    report = Table(
        title=f"{BATCH_SIZE} requests of {CONTEXT} tokens, medians of {rounds} rounds",
        caption=f"{cpu_name()}, {torch.get_num_threads()} threads, torch {torch.__version__}, "
        f"Python {platform.python_version()}",
    )
    report.add_column("builder")
    for heading in ("ms", "gathers", "bar"):
        report.add_column(heading, justify="right")
    for name, (_, bar) in builders.items():
        ratio = times[name] / times[GATHER]
        report.add_row(
            name, f"{times[name] * 1e3:.3f}", f"{ratio:.2f}", "" if bar is None else f"≤ {bar}"
        )
    Console().print(report)


if __name__ == "__main__":
    main()
