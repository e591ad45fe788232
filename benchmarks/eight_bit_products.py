"""Prompts over K and V of e4m3: the time and the error of products in 16 and in 8 bits.

    python -m benchmarks.eight_bit_products [--rounds 3] [--jobs 8] [--variants] [--json FILE]
    TRITON_INTERPRET=1 python -m benchmarks.eight_bit_products --dry-run    tiny, emulated, on a CPU

`16 bits` is the Triton backend, `8 bits` the same with its option `fp8_products`, and `fa3` is
FlashAttention 3 through its adapter, which rounds Q in the call; `fa3 alone` is its kernel with a Q
that was rounded before.

First each shape's error against float64 on fresh random inputs, of all rows: without the option it
must stay within EXACT_LIMIT, and with it within ROUNDED_LIMIT. Then the time of one layer's
attention over scattered pages, with the error on sampled queries. A time is the median of rounds in
which the sides take turns, each round the median of Triton's `do_bench`, which flushes the cache.
--variants adds other tiles of the 8-bit products.

--jobs N compiles in N processes before anything is timed; they also check the shapes.
"""

from __future__ import annotations

import importlib
import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import click
import torch
import triton
from benchmarks import libraries
from benchmarks.cases import dry_run_option, json_option, rounds_option
from benchmarks.emulated import emulated_libraries
from benchmarks.triton_gpu import cold_meter

from attnmux.core import AttentionBackend, AttnmuxError, BackendContext, Platform, Request
from attnmux.emulators.gluon import emulated
from attnmux.testing import (
    Case,
    errors_between,
    extend,
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
from attnmux.triton.launches.configs import ConfigEntry, TileConfig
from attnmux.triton.launches.hopper_configs import (
    HOPPER_HELD_TILES,
    HOPPER_HIGH_HELD_TILES,
    HOPPER_HIGH_TILES,
    HOPPER_TILES,
)

EXACT, ROUNDED, FA3, ALONE = "16 bits", "8 bits", "fa3", "fa3 alone"
SIDES = (EXACT, ROUNDED, FA3, ALONE)
VARIANTS: Mapping[str, TileConfig] = {
    "192x64x3": replace(HOPPER_HIGH_TILES, num_stages=3),
    "192x64 held": HOPPER_HIGH_HELD_TILES,
    "128x128": HOPPER_TILES,
    "128x128x3": replace(HOPPER_TILES, num_stages=3),
    "128x128 held": HOPPER_HELD_TILES,
}
"""Tiles by rows, keys of a block and, if more than 2, blocks ahead; held: queries in registers."""
EXACT_LIMIT = 1e-2
"""The relative error of 16-bit products: results and weights are rounded to bfloat16."""
ROUNDED_LIMIT = 0.045
"""The same of rounded queries: e4m3's rounding, of 0.026 in the mean, times a logit's spread of 1.
FlashAttention 3 also rounds the weights, and reaches 0.04."""
COLUMNS = {
    "step": "",
    "heads": "",
    **dict.fromkeys((f"{side}, us" for side in SIDES), ".1f"),
    **{"16 bits : fa3": ".3f", "8 bits : fa3": ".3f", "8 : 16 bits": ".3f"},
    **dict.fromkeys((f"{side}, error" for side in SIDES[:3]), ".4f"),
    "verdict": "",
}

STEPS = ((2, 1024, 6000), (4, 512, 8192), (1, 4096, 0), (8, 1024, 1024), (1, 512, 32_768))
"""Requests, new tokens of each, cached tokens."""
HEADS = ((32, 8, 128), (32, 8, 64))
"""Query and KV heads, and their columns."""
RAGGED = extend((500, 700), (1200, 1), (0, 300))
SHORT = extend((8000, 64))


def shape(name: str, heads: int, kv_heads: int, dim: int, page: int = 16, **more: Any) -> Case:  # noqa: ANN401  # fields of Case by name
    return Case(
        name=name,
        steps=(more.pop("step", RAGGED),),
        num_q_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        v_head_dim=dim,
        page_size=page,
        kv_dtype="fp8_e4m3",
        max_context_len=8192,
        host_lens=True,
        **{"windows": (None,), **more},
    )


SHAPES = (
    *(
        shape(
            f"group {group}, {dim}, page {page}",
            8 * max(group // 4, 1),
            8 // min(group, 4),
            dim,
            page,
        )
        for group, dim, page in (
            *((1, 128, 16), (4, 128, 1), (4, 128, 64), (8, 128, 16)),
            *((1, 64, 1), (4, 64, 16), (8, 64, 64), (1, 256, 64), (4, 256, 16), (8, 256, 1)),
        )
    ),
    shape("split keys", 32, 8, 128, step=SHORT),
    shape("LSE", 32, 8, 128, lse=True, kv_scales=(0.5, 2.0)),
    shape("sinks", 32, 8, 64, sinks=True),
    shape("cap", 32, 8, 128, logit_cap=30.0),
    shape("cap, 256", 8, 2, 256, logit_cap=30.0),
    shape("float16", 32, 8, 128, dtype="float16"),
    shape("window", 32, 8, 128, windows=(200,)),
    shape("other width", 32, 8, 96),
)
WITHOUT_PRODUCTS = ("window", "other width")
"""Shapes that the 8-bit products do not serve: the option changes nothing."""
TINY_SHAPES = (
    shape("tiny", 4, 2, 64, step=extend((30, 300), (0, 9))),
    shape("tiny window", 4, 2, 64, step=extend((30, 20)), windows=(7,)),
)
TINY_STEPS, TINY_HEADS = ((1, 260, 40),), ((2, 1, 64),)


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """A side's result; without an error, `failure` says why."""

    error: float | None = None
    """Norm of the difference from float64 by that of the expected answer."""
    us: float | None = None
    failure: str = ""


Figures = dict[str, Figure]
Make = Callable[[], Run]


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """The device, and what is drawn on it. Processes that compile get a copy."""

    platform: Platform
    device: str
    seed: int
    page: int
    variants: tuple[str, ...]

    def build(self, side: str, context: BackendContext) -> AttentionBackend:
        """Compiles nothing yet: a launch compiles what it needs."""
        if side == FA3:
            return find_candidate("nvidia/fa3", platforms=(self.platform,)).build(context)
        layer, own = context.layers[0], ()
        if side in VARIANTS:
            dims = layer.qk_head_dim, layer.v_head_dim
            own = (ConfigEntry(arch="sm90", dims=dims, key_bits=8, config=VARIANTS[side]),)
        return TritonBackend(
            context,
            {"fp8_products": side != EXACT},
            compute_units=compute_units(context),
            tables=ConfigTables(own_tiles=own),
        )

    def errors(self, case: Case) -> Figures:
        """Of all rows, by side."""
        return {side: found(lambda side=side: self._error(case, side)) for side in SIDES[:3]}

    def _error(self, case: Case, side: str) -> Figure:
        setup = make_setup(case, self.platform, self.device, seed=self.seed)
        step = prepare_step(setup, case.steps[0], host_lens=True)
        given, batch, context = step.inputs[0], step.batch, setup.context
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

    def step(self, sizes: Sequence[int], heads: Sequence[int]) -> Step:
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

    def sides(self, step: Step) -> dict[str, Make]:
        """What makes each side's call of one layer."""

        def ours(side: str) -> Run:
            backend = self.build(side, step.context(self.platform))
            backend.init_forward_metadata(step.batch)
            return step.calls_in_pool(backend)[0]

        def alone() -> Run:
            library = importlib.import_module("sgl_kernel.flash_attn")
            rounded = replace(step, q=step.q.to(torch.float8_e4m3fn))
            call = libraries.fa3(library, rounded)[0]
            return lambda: libraries.answer(call)

        made: dict[str, Make] = {
            side: lambda side=side: ours(side) for side in (*SIDES[:3], *self.variants)
        }
        return {**made, ALONE: alone}

    def times(self, sizes: Sequence[int], heads: Sequence[int], rounds: int) -> Figures:
        """Of one layer, with errors on sampled queries. rounds: 0 to compile and try alone."""
        step = self.step(sizes, heads)
        figures: Figures = {}
        runs: dict[str, Run] = {}

        def tried(side: str, make: Make) -> Figure:
            run = make()
            error = error_of(step, run(), layer=0)
            runs[side] = run
            return Figure(error=error)

        for side, make in self.sides(step).items():
            figures[side] = found(lambda side=side, make=make: tried(side, make))
        meters = {side: cold_meter(run, step.q.device) for side, run in runs.items()}
        taken = interleave(meters, rounds) if rounds else None
        for side in meters if taken is not None else ():
            figures[side] = replace(figures[side], us=taken.median(side))
        return figures


def found(figure: Callable[[], Figure]) -> Figure:
    try:
        return figure()
    except Exception as error:  # whatever a library raises is its result here
        return Figure(failure=AttnmuxError.in_brief(error))


def faults(figures: Figures, *, has_products: bool) -> str:
    """The sides whose answers are wrong; of 8 bits also one that nothing rounded."""
    wrong = []
    for side, figure in figures.items():
        error = figure.error
        is_rounded = side != EXACT and (has_products or side in (FA3, ALONE))
        if error is None:
            wrong += [] if side in (FA3, ALONE) else [f"{side} failed"]
        elif not error <= (ROUNDED_LIMIT if is_rounded else EXACT_LIMIT):
            wrong.append(f"{side} WRONG by {error:.2g}")
        elif is_rounded and side not in (FA3, ALONE) and error < EXACT_LIMIT:
            wrong.append(f"{side} NOT ROUNDED")
    return ", ".join(wrong) or "right"


def cells(step: str, heads: str, figures: Figures, verdict: str) -> Iterator[Any]:
    """As COLUMNS names them."""
    us = {side: figure.us for side, figure in figures.items()}

    def ratio(one: str, other: str) -> float | None:
        first, second = us.get(one), us.get(other)
        return None if first is None or second is None else first / second

    yield from (step, heads, *(us.get(side) for side in SIDES))
    yield from (ratio(EXACT, FA3), ratio(ROUNDED, FA3), ratio(ROUNDED, EXACT))
    yield from (figures[side].error if side in figures else None for side in SIDES[:3])
    yield verdict


def said(step: str, figures: Figures) -> Iterator[str]:
    """Failures, and the figures of variants."""
    for side, figure in figures.items():
        if figure.failure:
            yield f"- {step}, {side}: {figure.failure}"
        elif side in VARIANTS and figure.us is not None:
            by = "" if figures[FA3].us is None else f", {figure.us / figures[FA3].us:.3f} of fa3's"
            yield f"- {step}, 8 bits {side}: {figure.us:.1f} us{by}, error {figure.error:.4f}"


def compiled(
    place: Place, shapes: Sequence[Case], steps: Sequence[Any], jobs: int
) -> Iterator[tuple[Case, Figures]]:
    """The errors of the shapes. Processes find them and compile what the steps launch."""
    if not jobs:
        yield from ((case, place.errors(case)) for case in shapes)
        return
    spawning = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, spawning) as pool:
        tried = [pool.submit(place.times, *each, 0) for each in steps]
        begun: list[tuple[Case, Future[Figures]]] = [
            (case, pool.submit(place.errors, case)) for case in shapes
        ]
        yield from ((case, future.result()) for case, future in begun)
        for future in tried:
            future.result()


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
    place = Place(
        platform=Platform.parse("nvidia:sm90,cuda=13.0"),
        device="cpu" if dry_run else "cuda",
        seed=int(time.time()) if seed is None else seed,
        page=page,
        variants=tuple(VARIANTS) if variants else (),
    )
    shapes, sizes, heads = (
        (TINY_SHAPES, TINY_STEPS, TINY_HEADS) if dry_run else (SHAPES, STEPS, HEADS)
    )
    steps = [(each, of) for of in heads for each in sizes]
    with torch.no_grad(), ExitStack() as stack:
        if dry_run:
            stack.enter_context(emulated_libraries())
            stack.enter_context(emulated())
            stack.enter_context(patch.object(dispatch, "can_compile", lambda address: True))
        verdicts = measured(place, shapes, steps, rounds, 0 if dry_run else jobs, path)
    if any(verdict != "right" for verdict in verdicts):
        raise SystemExit(1)


def measured(
    place: Place,
    shapes: Sequence[Case],
    steps: Sequence[Any],
    rounds: int,
    jobs: int,
    path: Path | None,
) -> list[str]:
    """Print the table. Returns each row's verdict."""
    about = facts(
        torch.device(place.device), "triton", "sglang-kernel", platform=str(place.platform)
    )
    title = f"seed {place.seed}, pages of {place.page}; medians of {rounds} rounds, us of a layer"
    verdicts, notes = [], []
    with Report(COLUMNS, about, path, title=title) as report:

        def add(step: str, heads: str, figures: Figures, *, has_products: bool = True) -> None:
            verdicts.append(faults(figures, has_products=has_products))
            notes.extend(said(f"{step}, {heads}", figures))
            record = {side: asdict(figure) for side, figure in figures.items()}
            report.add(
                *cells(step, heads, figures, verdicts[-1]),
                record={"step": step, "heads": heads, "verdict": verdicts[-1], **record},
            )

        for case, figures in compiled(place, shapes, steps, jobs):
            has_products = not case.name.endswith(WITHOUT_PRODUCTS)
            heads = f"{case.num_q_heads}/{case.num_kv_heads} of {case.head_dim}"
            add(case.name, heads, figures, has_products=has_products)
        for (batch_size, new, prefix), (q_heads, kv_heads, dim) in steps:
            figures = place.times((batch_size, new, prefix), (q_heads, kv_heads, dim), rounds)
            step = f"{batch_size} x {new:,} on {prefix:,}"
            add(step, f"{q_heads}/{kv_heads} of {dim}", figures)
    for text in notes:
        report.note(text)
    return verdicts


if __name__ == "__main__":
    main()
