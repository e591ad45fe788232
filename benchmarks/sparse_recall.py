"""Decoding over chosen pages: what the shipped model still recalls, and the time of a step.

    python -m benchmarks.sparse_recall [--device cpu|cuda] [--prompts 64] [--rounds 5]
                                       [--page-size 16] [--keys 65536] [--layers 2] [--json FILE]

Recall: held-out prompts of 1,024 bytes, whose question and answer are decoded step by step, so that
each of their tokens reads a budget of 1, 2, 4 or 8 times fewer keys than the prompt has. An answer
is right if it is exactly the value and then ends.
Speed: one decode step of one request over so many keys, 32 query heads over 8 KV heads of 128, with
random K: metadata and layers, replayed from a graph where the device has them. `over dense` is the
median of the rounds' ratios; below 1 the chosen pages are faster.
"""

from __future__ import annotations

import random
from pathlib import Path

import click
import torch
from benchmarks.cases import decode, json_option, rounds_option

from attnmux.bench import Report, facts, interleave
from attnmux.bench.timing import Run, device_meter, graphs_of, in_graph
from attnmux.core import (
    AttentionBackend,
    Platform,
    SparseAttnBackend,
    detect,
    load_plugins,
    make_backend,
    solve,
    sparse_context,
)
from attnmux.transformers import (
    ModelRunner,
    RunnerOptions,
    SequenceState,
    load_runner,
    open_checkpoint,
    recall,
)

FACTORS = (1, 2, 4, 8)
LENGTH = 1024
COLUMNS = {"what": "", "fewer keys": "", "budget": "", "result": "", "over dense": ""}


def answers(runner: ModelRunner, ids: list[list[int]]) -> list[list[int]]:
    """What the model says greedily after each prompt, whose question is decoded."""
    states = [SequenceState(token_ids=one[: -recall.QUERY_BYTES]) for one in ids]
    for state in states:
        runner.extend([state])
    for place in range(recall.QUERY_BYTES):
        for state, one in zip(states, ids, strict=True):
            state.token_ids.append(one[place - recall.QUERY_BYTES])
        logits = runner.decode(states)
    said: list[list[int]] = [[] for _ in ids]
    for step in range(recall.MAX_DIGITS + 1):
        tokens = logits.argmax(-1).tolist()
        for one, state, token in zip(said, states, tokens, strict=True):
            one.append(token)
            state.token_ids.append(token)
        if step < recall.MAX_DIGITS:
            logits = runner.decode(states)
    runner.release(states)
    return said


def measure_recall(
    device: torch.device, platform: Platform, prompts: int, page_size: int, report: Report
) -> None:
    checkpoint = open_checkpoint(recall.PATH)
    rng = random.Random(f"sparse {LENGTH}")
    cases = [recall.make_prompt(rng, LENGTH) for _ in range(prompts)]
    ids = [list(prompt.encode()) for prompt, _ in cases]
    for factor in FACTORS:
        budget = LENGTH // factor // page_size * page_size
        options = RunnerOptions(
            max_batch_size=prompts,
            max_context_len=LENGTH + 16,
            max_total_tokens=prompts * (LENGTH + 16),
            page_size=page_size,
            sparse=None if factor == 1 else "quest",
            sparse_budget=None if factor == 1 else budget,
            graph=False,
            device=str(device),
        )
        runner = load_runner(checkpoint, platform, load_plugins().offers(), options)
        end = next(iter(checkpoint.stop_ids(runner.model)))
        said = answers(runner, ids)
        wanted = [[*value.encode(), end] for _, value in cases]
        pairs = zip(said, wanted, strict=True)
        right = sum(one[: len(value)] == value for one, value in pairs)
        share = f"{right}/{prompts} right"
        report.add("recall", f"{factor}x", "all" if factor == 1 else str(budget), share, "")


def measure_speed(
    device: torch.device,
    platform: Platform,
    keys: int,
    layers: int,
    page_size: int,
    rounds: int,
    report: Report,
) -> None:
    dtype = "float32" if device.type == "cpu" else "bfloat16"
    step = decode(1, keys, page_size=page_size, dtype=dtype).step(device, layers)
    offers = load_plugins().offers()
    request = step.request.replace(phases=("extend", "decode"), graph=device.type == "cuda")
    choice = solve(request, platform, offers).phases["decode"]
    context = step.context(platform, request)
    dense = make_backend(choice, context)
    sides: dict[str, AttentionBackend] = {"dense": dense}
    loc = torch.arange(step.pool.num_slots, device=device)
    for factor in FACTORS[1:]:
        chosen = make_backend(choice, sparse_context(context, keys // factor))
        sparse = SparseAttnBackend(context, whole=dense, chosen=chosen)
        for layer in context.layers:
            sparse.bounds.update(layer.layer_id, loc)
        sides[f"{factor}x"] = sparse

    def run_of(backend: AttentionBackend) -> Run:
        graphs = graphs_of(device)
        if graphs is not None:
            backend.init_cuda_graph_state(1, 1)
        backend.init_forward_metadata_out_graph(step.batch, in_capture=graphs is not None)
        calls = step.calls(backend)

        def run() -> None:
            backend.init_forward_metadata_in_graph(step.batch)
            for call in calls:
                call()

        return in_graph(run, graphs)

    meters = {side: device_meter(run_of(each), device, 3) for side, each in sides.items()}
    times = interleave(meters, rounds, warm_up=1)
    for side, factor in zip(sides, FACTORS, strict=True):
        ms = f"{times.median(side) / 1e3:.3f} ms, {choice.backend}"
        budget = "all" if factor == 1 else str(keys // factor)
        ratio = f"{times.ratio(side, 'dense'):.2f}"
        report.add(f"{layers} layers, {keys} keys", f"{factor}x", budget, ms, ratio)


@click.command()
@click.option("--device", "name", default="cuda" if torch.cuda.is_available() else "cpu")
@click.option("--prompts", type=click.IntRange(1), default=64, show_default=True)
@click.option("--keys", type=click.IntRange(512), default=65_536, show_default=True)
@click.option("--layers", type=click.IntRange(1), default=2, show_default=True)
@click.option("--page-size", type=click.IntRange(2), default=16, show_default=True)
@rounds_option(5)
@json_option
def main(
    name: str, prompts: int, keys: int, layers: int, page_size: int, rounds: int, path: Path | None
) -> None:
    """Print what is recalled with fewer keys, and the time of a step over dense attention's."""
    device = torch.device(name)
    found = detect(load_plugins()).platforms
    platform = next(one for one in found if one.device_type == device.type)
    title = f"Quest, pages of {page_size}, medians of {rounds} rounds"
    with Report(COLUMNS, facts(device, "attnmux-core"), path, title=title) as report:
        measure_recall(device, platform, prompts, page_size, report)
        measure_speed(device, platform, keys, layers, page_size, rounds, report)


if __name__ == "__main__":
    main()
