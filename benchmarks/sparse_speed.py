"""Decoding over chosen pages: the time of a step, and of each of its parts.

    python -m benchmarks.sparse_speed [--device cpu|cuda] [--rounds 5] [--page-size 16]
                                      [--keys 65536] [--layers 2] [--json FILE]

Steps: one decode step of one request over so many keys, 32 query heads over 8 KV heads of 128, with
random K. Dense, and over 2, 4 and 8 times fewer keys, where pages are chosen and copied by plain
torch, and by the kernels that are installed for the device. Eagerly, with the step's metadata, and
replayed from a graph where the device has them. `over dense` is the median of the rounds' ratios;
below 1 the chosen pages are faster.
Parts: each of a layer, alone, from a graph where the device has them; of `attention` the copies
alone are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import click
import torch
from benchmarks.cases import decode, json_option, rounds_option

from attnmux.core import (
    AttentionBackend,
    BackendContext,
    Choice,
    Plugins,
    make_backend,
    solve,
)
from attnmux.core.plugin import shared_kernel, with_shared_kernels
from attnmux.parts import RequestPages
from attnmux.parts.page_choice import PageKernels, PlainPages
from attnmux.parts.sparse_pages import SparseAttnBackend, sparse_context
from attnmux.testing.bench import Report, Step, facts, interleave
from attnmux.testing.bench.timing import Run, device_meter, graphs_of, in_graph

FACTORS = (2, 4, 8)
REPEATS = 3
COLUMNS = {"what": "", "fewer keys, by": "", "us": ".1f", "over dense": ""}


def make_step(
    device: torch.device, keys: int, layers: int, page_size: int
) -> tuple[Step, Choice, BackendContext]:
    """The step, and the backend that is chosen for it."""
    dtype = "float32" if device.type == "cpu" else "bfloat16"
    step = decode(1, keys, page_size=page_size, dtype=dtype).step(device, layers)
    plugins = Plugins.load()
    platform = next(one for one in plugins.detect().platforms if one.device_type == device.type)
    request = step.request.replace(phases=("extend", "decode"), graph=device.type == "cuda")
    choice = solve(request, platform, plugins.offers()).phases["decode"]
    return step, choice, with_shared_kernels(step.context(platform, request))


def over_pages(
    context: BackendContext,
    choice: Choice,
    dense: AttentionBackend,
    budget: int,
    kernels: PageKernels,
) -> SparseAttnBackend:
    """Decoding over chosen pages of a pool that is filled."""
    chosen = make_backend(choice, sparse_context(context, budget))
    sparse = SparseAttnBackend(context, whole=dense, chosen=chosen, kernels=kernels)
    loc = torch.arange(context.token_to_kv_pool.num_slots, device=context.device)
    for layer in context.layers:
        sparse.bounds.update(layer.layer_id, loc)
    return sparse


def eager(step: Step, backend: AttentionBackend) -> Run:
    calls = step.calls(backend)

    def run() -> None:
        backend.init_forward_metadata(step.batch)
        for call in calls:
            call()

    return run


def replayed(step: Step, backend: AttentionBackend) -> Run:
    backend.init_cuda_graph_state(1, 1)
    backend.init_forward_metadata_out_graph(step.batch, in_capture=True)
    calls = step.calls(backend)

    def run() -> None:
        backend.init_forward_metadata_in_graph(step.batch)
        for call in calls:
            call()

    return in_graph(run, graphs_of(step.batch.seq_lens.device))


def time_steps(
    step: Step, sides: Mapping[str, AttentionBackend], rounds: int, report: Report
) -> None:
    """sides: the dense backend first."""
    device = step.batch.seq_lens.device
    ways = {"eager": eager}
    if graphs_of(device) is not None:
        ways["graph"] = replayed
    dense = next(iter(sides))
    for way, run_of in ways.items():
        runs = {side: run_of(step, backend) for side, backend in sides.items()}
        meters = {side: device_meter(run, device, REPEATS) for side, run in runs.items()}
        times = interleave(meters, rounds, warm_up=1)
        for side in sides:
            ratio = f"{times.ratio(side, dense):.2f}"
            report.add(f"{len(step.layers)} layers, {way}", side, times.median(side), ratio)


def parts_of(step: Step, sparse: SparseAttnBackend, kernels: PageKernels) -> dict[str, Run]:
    """What a layer of a decode step does, part by part."""
    batch, context, layer_id = step.batch, sparse.context, step.layers[0].layer_id
    pool, copies = context.token_to_kv_pool, sparse.chosen.context.token_to_kv_pool
    page_size = pool.page_size
    requests = RequestPages(
        table=context.req_to_token_pool.req_to_token,
        rows=batch.req_pool_indices,
        lens=batch.seq_lens,
        page_size=page_size,
        width=-(-context.max_context_len // page_size),
    )
    buffers, targets = pool.get_kv_buffer(layer_id), copies.get_kv_buffer(layer_id)
    bounds = sparse.bounds.of(layer_id)
    number = sparse.chosen.context.max_context_len // page_size
    scores = kernels.score(step.q, *bounds, requests)
    places = kernels.choose(scores, requests, number)
    return {
        "bounds": partial(kernels.widen, buffers[0], *bounds, batch.out_cache_loc),
        "scores": partial(kernels.score, step.q, *bounds, requests),
        "choice": partial(kernels.choose, scores, requests, number),
        "copies": partial(kernels.copy, buffers, targets, places, requests),
    }


def time_parts(
    step: Step,
    sides: Mapping[str, tuple[SparseAttnBackend, PageKernels]],
    rounds: int,
    report: Report,
) -> None:
    device = step.batch.seq_lens.device
    graphs = graphs_of(device)
    meters = {
        f"{part}: {side}": device_meter(in_graph(run, graphs), device, REPEATS)
        for side, (sparse, kernels) in sides.items()
        for part, run in parts_of(step, sparse, kernels).items()
    }
    times = interleave(meters, rounds, warm_up=1)
    for part in sorted(meters):
        report.add(*part.split(": "), times.median(part), None)


@click.command()
@click.option("--device", "name", default="cuda" if torch.cuda.is_available() else "cpu")
@click.option("--keys", type=click.IntRange(512), default=65_536, show_default=True)
@click.option("--layers", type=click.IntRange(1), default=2, show_default=True)
@click.option("--page-size", type=click.IntRange(2), default=16, show_default=True)
@rounds_option(5)
@json_option
def main(name: str, keys: int, layers: int, page_size: int, rounds: int, path: Path | None) -> None:
    """Print the time of a step over chosen pages next to a dense one's, and of its parts."""
    device = torch.device(name)
    step, choice, context = make_step(device, keys, layers, page_size)
    ways: dict[str, PageKernels] = {"torch": PlainPages()}
    fast = shared_kernel("chosen_pages", context)
    if fast is not None:
        ways["kernels"] = fast
    dense = make_backend(choice, context)
    sides = {
        f"{factor}x, {way}": (over_pages(context, choice, dense, keys // factor, kernels), kernels)
        for way, kernels in ways.items()
        for factor in FACTORS
    }
    title = f"{choice.backend}, {keys} keys, pages of {page_size}, medians of {rounds} rounds"
    with Report(COLUMNS, facts(device, "attnmux-core"), path, title=title) as report:
        backends = {"1x, dense": dense, **{side: one for side, (one, _) in sides.items()}}
        time_steps(step, backends, rounds, report)
        time_parts(step, sides, rounds, report)


if __name__ == "__main__":
    main()
