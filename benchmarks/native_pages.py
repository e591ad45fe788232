"""What reading pages of K and V allows: the bound of decoding on a CPU with AVX-512-BF16.

    python -m benchmarks.native_pages [--rounds 9] [--json FILE]

`native_pages.cpp` reads 16 requests of 2,048 tokens, with 8 heads of 128 in bfloat16 and pages of
16, scattered at random, and does the products of 4 or 8 queries of a KV head on each line: no
logits, weights or results. One thread; all orders take turns with the order of memory (`one run`,
without fetches, 4 products of a line), whose time over that of a row is "of one run". Times are of
the CPU, medians of the rounds.
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import click
import torch
from benchmarks.cases import json_option, rounds_option
from benchmarks.native import CPU, cpu_meter

from attnmux.core.contract.memory import zeros
from attnmux.cpu.levels import BF16, find_compiler
from attnmux.testing.bench import Report, facts, interleave

SOURCE = Path(__file__).with_suffix(".cpp")
NUM_PAGES, PAGE_ROWS, ROW = 2048, 16, 2048
"""Pages of K, as many of V, tokens of a page, and bytes of a token's K, as in the source."""
ORDERS = {
    "row after row, no fetches": (1, 256, 0, 0),
    "row after row": (1, 256, 16, 0),
    "row after row, held back": (1, 256, 16, 2),
    "8 rows, a head at a time": (8, 256, 16, 0),
    "8 rows, a head at a time, held back": (8, 256, 16, 2),
    "16 rows, a line at a time": (16, 64, 32, 0),
    "16 rows, a line at a time, held back": (16, 64, 32, 2),
}
"""Rows at a time, bytes of each, rows between reading and fetching, and the pace of fetches."""
COLUMNS = {"order": "", "products of a line": "", "ms": ".2f", "of one run": ".0%"}


def compiled(folder: Path) -> ctypes.CDLL:
    """The reading loops. Raises ClickException without a compiler."""
    compiler = find_compiler()
    if compiler is None:
        raise click.ClickException("no C++ compiler is on PATH: install g++ or clang++")
    library = folder / "native_pages.so"
    flags = ("-std=c++17", "-O3", "-fPIC", "-shared", *BF16.flags)
    subprocess.run([compiler, *flags, str(SOURCE), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


def pool() -> torch.Tensor:
    """K or V, in huge pages where the system grants them."""
    return zeros((NUM_PAGES * PAGE_ROWS * ROW,), dtype=torch.uint8, device=CPU).fill_(0)


@click.command()
@rounds_option(9)
@json_option
def main(rounds: int, path: Path | None) -> None:
    """Print the times of orders of reading."""
    torch.set_num_threads(1)
    pools = pool(), pool()
    starts = [each.data_ptr() for each in pools]
    page_bytes = PAGE_ROWS * ROW
    scattered = [
        start + page * page_bytes for page in torch.randperm(NUM_PAGES).tolist() for start in starts
    ]
    in_order = [start + page * page_bytes for start in starts for page in range(NUM_PAGES)]
    sums = (ctypes.c_float * 1)()
    with tempfile.TemporaryDirectory() as folder:
        read_pages = compiled(Path(folder)).read_pages

        def reading(pages: list[int], products: int, order: tuple[int, ...]) -> Callable[[], None]:
            of = (ctypes.c_void_p * len(pages))(*pages)
            return partial(read_pages, of, ctypes.c_int64(len(pages)), products, *order, sums)

        runs = {
            ("one run", products): reading(in_order, products, (1, 256, 0, 0))
            for products in (4, 8)
        }
        runs |= {
            (name, products): reading(scattered, products, order)
            for products in (4, 8)
            for name, order in ORDERS.items()
        }
        times = interleave(
            {str(key): cpu_meter(run) for key, run in runs.items()}, rounds, warm_up=1
        )
    best = times.median(str(("one run", 4)))
    with Report(COLUMNS, facts(CPU), path, title=f"134 MB, medians of {rounds} rounds") as report:
        for name, products in runs:
            took = times.median(str((name, products)))
            report.add(name, str(products), took / 1e3, best / took)


if __name__ == "__main__":
    main()
