"""Cost of the index builders on a CPU, as a ratio to one random gather in the same run.

    python -m benchmarks.indices [--threads N] [--rounds N] [--json FILE]

The gather, `req_to_token.view(-1)[idx]` with 2**20 random indices, reads as many slots as
256 requests of 4,096 tokens have. Bars: CSR indices at most 4 gathers, a page table at most 1.
Every round runs every builder once; medians are printed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import click
import torch
from benchmarks.cases import json_option, rounds_option, threads_option

from attnmux.core.plugin import kv_indices, kv_indptr, page_table
from attnmux.testing.bench import Report, facts, interleave, wall_meter

CPU = torch.device("cpu")
BATCH_SIZE, CONTEXT, MAX_CONTEXT, NUM_ROWS = 256, 4096, 8192, 512
GATHER = "gather of 2**20 slots"
COLUMNS = {"builder": "", "ms": ".3f", "gathers": ".2f", "at most": ".0f"}


def make_builders() -> Mapping[str, tuple[Callable[[], torch.Tensor], float | None]]:
    """Each builder by name, with its bar in gathers where it has one."""
    generator = torch.Generator().manual_seed(0)
    slots = torch.randperm(NUM_ROWS * MAX_CONTEXT, generator=generator)
    table = slots.to(torch.int32).view(NUM_ROWS, MAX_CONTEXT)
    rows = torch.randperm(NUM_ROWS - 1, generator=generator)[:BATCH_SIZE] + 1
    lens = torch.full((BATCH_SIZE,), CONTEXT, dtype=torch.int32)
    uneven = torch.randint(0, 2 * CONTEXT, (BATCH_SIZE,), generator=generator, dtype=torch.int32)
    random_cells = torch.randint(table.numel(), (2**20,), generator=generator)
    buffer = torch.empty(BATCH_SIZE * CONTEXT, dtype=torch.int32)
    start = torch.full((BATCH_SIZE,), 64, dtype=torch.int32)

    def csr(kv_lens: torch.Tensor, page_size: int = 1) -> torch.Tensor:
        indptr = kv_indptr(kv_lens, page_size=page_size)
        return kv_indices(table, rows, indptr, page_size=page_size)

    def into_buffer() -> torch.Tensor:
        return kv_indices(table, rows, kv_indptr(lens), out=buffer)

    def from_start() -> torch.Tensor:
        return page_table(table, rows, lens, kv_start=start, max_len=CONTEXT)

    return {
        GATHER: (lambda: table.view(-1)[random_cells], None),
        "kv_indptr + kv_indices": (lambda: csr(lens), 4),
        "kv_indptr + kv_indices, lengths 0 to 8191": (lambda: csr(uneven), 4),
        "kv_indptr + kv_indices, page 16": (lambda: csr(lens, 16), None),
        "kv_indices into a graph's buffer": (into_buffer, None),
        "page_table, page 1": (lambda: page_table(table, rows, lens), 1),
        "page_table, page 16": (lambda: page_table(table, rows, lens, page_size=16), 1),
        "page_table, page 1, kv_start": (from_start, None),
    }


@click.command()
@threads_option
@rounds_option(50)
@json_option
def main(rounds: int, path: Path | None) -> None:
    """Print the builders' times, and their ratios to a gather."""
    builders = make_builders()
    meters = {name: wall_meter(build, CPU) for name, (build, _) in builders.items()}
    times = interleave(meters, rounds, warm_up=5)
    title = f"{BATCH_SIZE} requests of {CONTEXT} tokens, medians of {rounds} rounds"
    with Report(COLUMNS, facts(CPU), path, title=title) as report:
        for name, (_, bar) in builders.items():
            median = times.median(name)
            ratio = median / times.median(GATHER)
            report.add(name, median / 1e3, ratio, bar, missed=bar is not None and ratio > bar)


if __name__ == "__main__":
    main()
