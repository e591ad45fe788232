"""Prompts alone on the engine's runner: eagerly, in pieces between graphs, compiled, and both.

    python -m benchmarks.prompts [--lengths 256,900,1024] [--rounds 20] [--new 16] [--backend fa3]
                                 [--random 3b] [--device DEVICE] [--usual] [--json FILE]
    python -m benchmarks.prompts --random tiny --lengths 8,13 --rounds 2 --device cpu     to try it

`alone` is one prompt from its tokens to a logit on the host, `calls` the same step again and again
without a wait, `host` the launch of such a call, each in ms, medians of the rounds. `error` is the
largest difference of a way's logits from those of its reference, as a share of their largest value,
and `tokens` counts the greedy tokens up to the first that differs. The reference of pieces is the
way without them, and that of the compiled way the eager one. Each way is measured on its own, since
compiling moves weights. `--usual` captures all usual sizes, and says what they take. On a CPU
recorded operations take the place of graphs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import click
import torch
from benchmarks.cases import json_option, rounds_option
from benchmarks.engine import RANDOM, make_prompts, make_random

from attnmux.core import DeviceGraphs, Policy
from attnmux.testing import RecordingGraphs
from attnmux.testing.bench import Report, facts
from attnmux.transformers import Engine, ModelRunner, RunnerOptions, SequenceState
from attnmux.transformers.options import PIECE_SIZES

CALLS = 10
"""Calls in a row."""
COLUMNS = {
    "tokens of the prompt": "",
    "way": "",
    "alone": ".2f",
    "calls": ".2f",
    "host": ".2f",
    "error": ".1e",
    "tokens": "",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """One prompt in one way."""

    alone: float
    calls: float
    host: float
    logits: torch.Tensor
    text: tuple[int, ...]


@click.command(context_settings={"show_default": True})
@click.option("--lengths", default="256,900,1024", help="Tokens of prompts.")
@rounds_option(20)
@click.option("--new", type=click.IntRange(2), default=16, help="Tokens of each text.")
@click.option("--random", "shape", type=click.Choice([*RANDOM]), default="3b")
@click.option("--backend", default=None)
@click.option("--device", default=None)
@click.option("--usual", is_flag=True, help="Capture all usual sizes.")
@json_option
def main(
    lengths: str,
    rounds: int,
    new: int,
    shape: str,
    backend: str | None,
    device: str | None,
    usual: bool,
    path: Path | None,
) -> None:
    """Print the times of prompts in each way, and compare the results."""
    counts = [int(length) for length in lengths.split(",")]
    most = max(*counts, PIECE_SIZES[-1] if usual else 1) + new
    options = RunnerOptions(
        max_batch_size=1,
        max_context_len=most,
        max_total_tokens=most,
        device=device,
        graph=False,
        policy=Policy(backend=backend),
    )
    runner = make_random(shape, options)
    ways: dict[str, tuple[str, Callable[[ModelRunner], object]]] = {
        "eager": ("eager", lambda _: None),
        "in pieces": ("eager", lambda made: capture(made, counts, usual)),
        "compiled": ("eager", lambda made: made.compile()),
        "compiled, in pieces": ("compiled", lambda made: capture(made, counts, usual)),
    }
    about = facts(runner.context.device, "transformers", decision=runner.decision.summary())
    results: dict[tuple[str, int], Result] = {}
    with Report(COLUMNS, about, path, title=runner.decision.summary()) as report:
        for way, (reference, prepare) in ways.items():
            began = time.perf_counter()
            prepare(runner)
            took = time.perf_counter() - began
            for count in counts:
                results[way, count] = measure(runner, count, rounds, new)
                add(report, way, count, results[way, count], results[reference, count])
            report.save(**{f"{way}, seconds": took})
            if runner.pieces is not None:
                sizes = runner.pieces.runner.memory_bytes
                mib = sum(sizes.values()) / 2**20
                report.note(f"{way}: {len(sizes)} sizes in {took:.1f} s, {mib:.0f} MiB")


def capture(runner: ModelRunner, counts: list[int], usual: bool) -> None:
    fitting = [min(size for size in PIECE_SIZES if size >= count) for count in counts]
    devices = RecordingGraphs() if runner.context.device.type == "cpu" else None
    sizes = PIECE_SIZES if usual else tuple(sorted(set(fitting)))
    runner.capture_pieces(sizes=sizes, devices=devices or DeviceGraphs.of(runner.context.device))


def add(report: Report, way: str, count: int, result: Result, reference: Result) -> None:
    difference = (result.logits - reference.logits).abs().max() / reference.logits.abs().max()
    pairs = zip(result.text, reference.text, strict=True)
    same = next((place for place, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
    alike = len(result.text) if same is None else same
    figures = (result.alone, result.calls, result.host, float(difference))
    report.add(str(count), way, *figures, f"{alike} of {len(result.text)}")


def measure(runner: ModelRunner, count: int, rounds: int, new: int) -> Result:
    ids = make_prompts(runner, 1, count)[0]
    logits = torch.empty(0)

    def alone() -> float:
        nonlocal logits
        state = SequenceState(token_ids=ids)
        began = time.perf_counter()
        result = runner.extend([state])
        result[0, 0].item()
        spent = time.perf_counter() - began
        logits = result.float().cpu()
        runner.release([state])
        return spent * 1e3

    def in_a_row() -> tuple[float, float]:
        began = time.perf_counter()
        for _ in range(CALLS):
            result = runner.forward(step, step.last_indices)
        launched = time.perf_counter()
        result[0, 0].item()
        both = launched - began, time.perf_counter() - began
        return both[0] / CALLS * 1e3, both[1] / CALLS * 1e3

    spent = statistics.median([alone() for _ in range(rounds + 3)][3:])
    state = SequenceState(token_ids=ids)
    step = runner.steps.extend([state])
    calls = [in_a_row() for _ in range(max(rounds // CALLS, 1) + 1)][1:]
    runner.release([state])
    engine = Engine(runner, prefix_cache=False)
    engine.add(ids, max_new_tokens=new)
    text: tuple[int, ...] = ()
    while engine.has_work:
        for output in engine.step():
            if output.result is not None:
                text = output.result.token_ids
    host, whole = (statistics.median(column) for column in zip(*calls, strict=True))
    return Result(alone=spent, calls=whole, host=host, logits=logits, text=text)


if __name__ == "__main__":
    main()
