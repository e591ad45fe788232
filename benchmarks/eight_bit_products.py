"""Prompts over K and V of e4m3: the time and the error of products in 16 and in 8 bits.

    python -m benchmarks.eight_bit_products [--rounds 3] [--jobs 8] [--variants] [--json FILE]
    TRITON_INTERPRET=1 python -m benchmarks.eight_bit_products --dry-run    tiny, emulated, on a CPU

`16 bits` is the Triton backend, `queries` and `all` the same with these values of its option
`fp8_products`, and `fa3` is FlashAttention 3 through its adapter, which rounds Q in the call; `fa3
alone` is its kernel with a Q that was rounded before.

First each shape's error against float64 on fresh random inputs, of all rows: without the option it
must stay within EXACT_LIMIT, and with it within ROUNDED_LIMIT. Then the time of one layer's
attention over scattered pages, with the error on sampled queries. A time is the median of rounds in
which the sides take turns, each round the median of Triton's `do_bench`, which flushes the cache.
--variants adds other tiles of the 8-bit products. `eight_bit_cases.py` has the shapes.

--jobs N compiles in N processes before anything is timed; they also check the shapes.
"""

from __future__ import annotations

import importlib
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import click
import torch
import triton
from benchmarks import eight_bit_cases, libraries
from benchmarks.cases import dry_run_option, json_option, rounds_option
from benchmarks.eight_bit_cases import (
    ALONE,
    CHECKED,
    COLUMNS,
    FA3,
    OPTIONS,
    SIDES,
    TILES,
    VARIANTS,
    Figure,
    Sizes,
)
from benchmarks.emulated import emulated_libraries
from benchmarks.triton_gpu import cold_meter

from attnmux.core import AttentionBackend, AttnmuxError, BackendContext, Platform, Request
from attnmux.emulators.gluon import emulated
from attnmux.testing import (
    Case,
    errors_between,
    find_candidate,
    make_setup,
    prepare_step,
    reference,
)
from attnmux.testing.bench import Report, Step, Workload, error_of, facts, interleave, make_step
from attnmux.testing.bench.timing import Run
from attnmux.triton.attention.backend import TritonBackend
from attnmux.triton.attention.factory import compute_units
from attnmux.triton.launches import dispatch
from attnmux.triton.launches.config_tables import ConfigTables
from attnmux.triton.launches.configs import ConfigEntry

Figures = dict[str, Figure]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sides:
    """The device, what is drawn on it, and the sides. Processes that compile get a copy."""

    platform: Platform
    device: str
    seed: int
    page: int
    variants: tuple[str, ...]

    def build(self, side: str, context: BackendContext) -> AttentionBackend:
        """Compiles nothing yet: a launch compiles what it needs."""
        if side == FA3:
            return find_candidate("nvidia/fa3", platforms=(self.platform,)).build(context)
        tables = ConfigTables()
        if side in VARIANTS:
            side, tiles = VARIANTS[side]
            dims = context.layers[0].qk_head_dim, context.layers[0].v_head_dim
            entry = ConfigEntry(arch="sm90", dims=dims, key_bits=8, config=TILES[tiles])
            tables = ConfigTables(own_tiles=(entry,))
        return TritonBackend(
            context,
            {"fp8_products": OPTIONS[side]},
            compute_units=compute_units(context),
            tables=tables,
        )

    def errors(self, case: Case) -> Figures:
        """Each side's error over all rows."""
        return {side: tried(partial(self._error, case, side)) for side in CHECKED}

    def _error(self, case: Case, side: str) -> Figure:
        setup = make_setup(case, self.platform, self.device, seed=self.seed)
        step = prepare_step(setup, case.steps[0], host_lens=True)
        given, batch, context = step.inputs[0], step.batch, setup.context
        # The suite's Q has values of e4m3
        q = setup.random(*given.q.shape)
        lse = torch.empty(q.shape[:2], device=q.device) if case.lse else None
        backend = self.build(side, context)
        backend.init_forward_metadata(batch)
        out = backend.forward(q, given.k, given.v, given.layer, batch, lse=lse)
        expected, expected_lse = reference.attention(
            q, given.layer, batch, context.req_to_token_pool.req_to_token, context.token_to_kv_pool
        )
        error = errors_between(out.double(), expected, out.dtype).relative
        if lse is not None:
            off = (lse.double() - expected_lse).norm() / expected_lse.norm()
            error = max(error, float(off))
        return Figure(error=error)

    def step(self, sizes: Sizes, heads: Sizes) -> Step:
        batch_size, new, prefix = sizes
        q_heads, kv_heads, dim = heads
        request = Request(
            num_q_heads=q_heads,
            num_kv_heads=kv_heads,
            head_dim=dim,
            dtype="bfloat16",
            kv_dtype="fp8_e4m3",
            page_size=self.page,
        )
        work = Workload(phase="extend", batch_size=batch_size, new=new, prefix=prefix)
        device = torch.device(self.device)
        return make_step(work, request, device, seed=self.seed, num_layers=1)

    def run(self, side: str, step: Step) -> Run:
        """A side's call of the step's layer."""
        if side == ALONE:
            library = importlib.import_module("sgl_kernel.flash_attn")
            rounded = replace(step, q=step.q.to(torch.float8_e4m3fn))
            return partial(libraries.answer, libraries.fa3(library, rounded)[0])
        backend = self.build(side, step.context(self.platform))
        backend.init_forward_metadata(step.batch)
        return step.calls_in_pool(backend)[0]

    def times(self, sizes: Sizes, heads: Sizes, rounds: int) -> Figures:
        """Each side's time for one layer, and its error on sampled queries. With 0 rounds the sides
        compile and run once, and nothing is timed."""
        step = self.step(sizes, heads)
        runs: dict[str, Run] = {}

        def answer(side: str) -> Figure:
            run = self.run(side, step)
            out = run()
            assert isinstance(out, torch.Tensor)
            error = error_of(step, out, layer=0)
            runs[side] = run
            return Figure(error=error)

        sides = (*SIDES, *self.variants)
        figures = {side: tried(partial(answer, side)) for side in sides}
        if rounds:
            meters = {side: cold_meter(run, step.q.device) for side, run in runs.items()}
            taken = interleave(meters, rounds)
            for side in meters:
                figures[side] = replace(figures[side], us=taken.median(side))
        return figures


def tried(figure: Callable[[], Figure]) -> Figure:
    try:
        return figure()
    except Exception as error:  # whatever a library raises is its result here
        return Figure(failure=AttnmuxError.in_brief(error))


Steps = Sequence[tuple[Sizes, Sizes]]


def compiled(
    sides: Sides, shapes: Sequence[Case], steps: Steps, jobs: int
) -> Iterator[tuple[Case, Figures]]:
    """The errors of the shapes. Processes find them, and compile what the steps launch."""
    if not jobs:
        yield from ((case, sides.errors(case)) for case in shapes)
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        ready = [pool.submit(sides.times, *step, 0) for step in steps]
        found = [(case, pool.submit(sides.errors, case)) for case in shapes]
        yield from ((case, future.result()) for case, future in found)
        for future in ready:
            future.result()


def measured(
    sides: Sides, shapes: Sequence[Case], steps: Steps, rounds: int, jobs: int, path: Path | None
) -> bool:
    """Print the table. Whether every answer is right."""
    device = torch.device(sides.device)
    about = facts(device, "triton", "sglang-kernel", platform=str(sides.platform))
    title = f"seed {sides.seed}, pages of {sides.page}; medians of {rounds} rounds, us of a layer"
    verdicts: list[str] = []
    notes: list[str] = []
    with Report(COLUMNS, about, path, title=title) as report:

        def add(step: str, of: Sizes, figures: Figures, *, has_products: bool = True) -> None:
            heads = f"{of[0]}/{of[1]} of {of[2]}"
            verdicts.append(eight_bit_cases.faults(figures, has_products=has_products))
            notes.extend(eight_bit_cases.notes(f"{step}, {heads}", figures))
            report.add(
                *eight_bit_cases.cells(step, heads, figures, verdicts[-1]),
                record={
                    **{"step": step, "heads": heads, "verdict": verdicts[-1]},
                    **{side: asdict(figure) for side, figure in figures.items()},
                },
            )

        for case, figures in compiled(sides, shapes, steps, jobs):
            has_products = not case.name.endswith(eight_bit_cases.WITHOUT_PRODUCTS)
            of = case.num_q_heads, case.num_kv_heads, case.head_dim
            add(case.name, of, figures, has_products=has_products)
        for sizes, of in steps:
            name = f"{sizes[0]} x {sizes[1]:,} on {sizes[2]:,}"
            add(name, of, sides.times(sizes, of, rounds))
    for text in notes:
        report.note(text)
    return set(verdicts) == {"right"}


@click.command()
@rounds_option(3)
@click.option("--jobs", type=click.IntRange(0), default=8, show_default=True, help="0: none.")
@click.option("--seed", type=int, help="Of all inputs; default: drawn.")
@click.option("--page", type=click.IntRange(1), default=16, show_default=True, help="Page size.")
@click.option("--variants", is_flag=True, help="Time the other tiles too.")
@json_option
@dry_run_option("Tiny sizes, emulated")
def main(
    rounds: int,
    jobs: int,
    seed: int | None,
    page: int,
    variants: bool,
    path: Path | None,
    dry_run: bool,
) -> None:
    """Print errors, then times and errors, and exit with 1 if an answer is wrong."""
    if dry_run and not triton.knobs.runtime.interpret:
        raise click.UsageError("--dry-run runs kernels in Triton's interpreter: TRITON_INTERPRET=1")
    sides = Sides(
        platform=Platform.parse("nvidia:sm90,cuda=13.0"),
        device="cpu" if dry_run else "cuda",
        seed=int(time.time()) if seed is None else seed,
        page=page,
        variants=tuple(VARIANTS) if variants else (),
    )
    table = eight_bit_cases
    shapes, sizes, heads = table.SHAPES, table.STEPS, table.HEADS
    if dry_run:
        shapes, sizes, heads, jobs = table.TINY_SHAPES, table.TINY_STEPS, table.TINY_HEADS, 0
    steps = [(each, of) for of in heads for each in sizes]
    with torch.no_grad(), ExitStack() as stack:
        if dry_run:
            stack.enter_context(emulated_libraries())
            stack.enter_context(emulated())
            stack.enter_context(patch.object(dispatch, "can_compile", lambda address: True))
        is_right = measured(sides, shapes, steps, rounds, jobs, path)
    if not is_right:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
