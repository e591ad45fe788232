"""The engine's decode steps, replayed from graphs and run eagerly, and where the host's time goes.

    python benchmarks/engine.py [--prompts 64] [--length 240] [--new 128] [--rounds 5]
                                [--model FOLDER] [--backend NAME] [--page-size N]
                                [--device DEVICE] [--stream] [--json FILE]

Both ways run by turns on one runner: the same prompts, the same tokens to generate, no stop id, no
prefix cache. A figure is the median of the rounds, the ratio the median of the rounds' ratios.
Without device graphs only the eager way is measured. The table is of decode steps in which all
prompts take part; `wait` is the time in which the host waits for the device's tokens, all else is
work of the host. `--stream` adds text to every step, by one callback a prompt.
"""

from __future__ import annotations

import json
import platform as machine
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
import transformers

from attnmux.core import detect, load_plugins, pick_platform
from attnmux.core.batch import ForwardBatch
from attnmux.core.choosing.ask.policy import Policy
from attnmux.core.errors import GraphUnsupported
from attnmux.core.graph.runner import GraphRunner
from attnmux.transformers import (
    Checkpoint,
    Engine,
    ModelRunner,
    RunnerOptions,
    load_runner,
    open_checkpoint,
    recall,
)
from attnmux.transformers.engine import PARTS

BETWEEN = ("commit", "stream", "schedule", "allocate", "metadata")
"""From the tokens of one step to the launch of the next one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """One way, once."""

    seconds: float
    """All prompts, from the first `add` to the last token."""
    step_us: float
    """A decode step of all prompts."""
    decode_tokens_per_second: float
    parts_us: dict[str, float]
    """Of such a step."""
    tokens: list[tuple[int, ...]]


class MetadataClock:
    """How long the backend's host work takes, which a graph's replay includes."""

    def __init__(self, runner: ModelRunner) -> None:
        self.seconds = 0.0
        self._prepare: Callable[..., None] = runner.backend.init_forward_metadata_out_graph
        runner.backend.init_forward_metadata_out_graph = self  # type: ignore[method-assign]  # timed

    def __call__(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        began = time.perf_counter()
        self._prepare(batch, in_capture)
        self.seconds += time.perf_counter() - began


@click.command(context_settings={"show_default": True})
@click.option("--prompts", "num_prompts", type=click.IntRange(min=1), default=64)
@click.option("--length", type=click.IntRange(min=1), default=240, help="Tokens of a prompt.")
@click.option(
    "--new",
    type=click.IntRange(min=2),
    default=128,
    help="Tokens to generate for each; the first comes with its prompt.",
)
@click.option("--rounds", type=click.IntRange(min=1), default=5)
@click.option("--model", default=str(recall.PATH), help="A folder or a hub id.")
@click.option("--backend", default=None)
@click.option("--device", default=None)
@click.option("--page-size", type=int, default=None)
@click.option("--stream", is_flag=True)
@click.option("--json", "file", type=click.Path(path_type=Path), default=None)
def main(
    num_prompts: int,
    length: int,
    new: int,
    rounds: int,
    model: str,
    backend: str | None,
    device: str | None,
    page_size: int | None,
    stream: bool,
    file: Path | None,
) -> None:
    """Measure and print."""
    checkpoint = open_checkpoint(model)
    runner = load(checkpoint, num_prompts, length + new, backend, device, page_size)
    prompts = make_prompts(checkpoint, num_prompts, length)
    clock = MetadataClock(runner)
    graphs, reason = capture(runner)
    ways: dict[str, GraphRunner | None] = {"eager": None}
    if graphs is not None:
        ways["graphs"] = graphs

    measured: dict[str, list[Round]] = {way: [] for way in ways}
    for number in range(rounds + 1):
        for way, its_graphs in ways.items():
            runner.graphs = its_graphs
            result = run(runner, checkpoint, prompts, new, clock, stream=stream)
            if number:  # the first one warms up
                measured[way].append(result)
    answer = report(runner, measured, reason, num_prompts, length, new)
    if file is not None:
        file.write_text(json.dumps(answer, indent=2) + "\n")


def load(
    checkpoint: Checkpoint,
    num_prompts: int,
    context: int,
    backend: str | None,
    device: str | None,
    page_size: int | None,
) -> ModelRunner:
    """The runner, eager so far, with room for all prompts at a time."""
    plugins = load_plugins()
    options = RunnerOptions(
        max_batch_size=num_prompts,
        max_context_len=context,
        max_total_tokens=num_prompts * context,
        page_size=page_size,
        device=device,
        graph=False,
        policy=Policy(backend=backend),
    )
    return load_runner(checkpoint, pick_platform(detect(plugins)), plugins.offers(), options)


def make_prompts(checkpoint: Checkpoint, num_prompts: int, length: int) -> list[list[int]]:
    """Ids below the vocabulary's special ones at its end."""
    rng = random.Random(0)
    top = min(checkpoint.vocabulary_size, 256)
    return [[rng.randrange(1, top) for _ in range(length)] for _ in range(num_prompts)]


def capture(runner: ModelRunner) -> tuple[GraphRunner | None, str]:
    """The graphs, or why there are none."""
    try:
        runner.capture_graphs()
    except GraphUnsupported as error:
        return None, str(error)
    return runner.graphs, ""


def run(
    runner: ModelRunner,
    checkpoint: Checkpoint,
    prompts: list[list[int]],
    new: int,
    clock: MetadataClock,
    *,
    stream: bool,
) -> Round:
    """Generate for all prompts; the steps that run prompts are not in the parts."""
    tokenizer = checkpoint.require_tokenizer() if stream else None
    # All prompts in one step, so that all of them decode from the first step to the last.
    prefill_tokens = sum(map(len, prompts))
    engine = Engine(runner, tokenizer=tokenizer, prefill_tokens=prefill_tokens, prefix_cache=False)
    began = time.perf_counter()
    for ids in prompts:
        engine.add(ids, max_new_tokens=new, on_text=hear if stream else None)
    tokens: dict[int, tuple[int, ...]] = {}
    clock.seconds = 0.0
    while engine.has_work:
        if engine.stats.decode.steps == 0:
            clock.seconds = 0.0
        for output in engine.step():
            if output.result is not None:
                tokens[output.request_id] = output.result.token_ids
    seconds = time.perf_counter() - began
    decode = engine.stats.decode
    parts = {str(part): spent / decode.steps * 1e6 for part, spent in decode.parts.items()}
    if runner.graphs is not None:
        parts["metadata"] = clock.seconds / decode.steps * 1e6
        parts["launch"] -= parts["metadata"]
    return Round(
        seconds=seconds,
        step_us=decode.seconds / decode.steps * 1e6,
        decode_tokens_per_second=decode.new_tokens / decode.seconds,
        parts_us=parts,
        tokens=[tokens[index] for index in range(len(prompts))],
    )


def hear(piece: str, last: bool) -> None:
    """Stands for a client."""


def median(values: list[float]) -> float:
    return statistics.median(values)


def summary(rounds: list[Round]) -> dict[str, Any]:
    """Medians of one way."""
    parts = {str(part): median([one.parts_us[part] for one in rounds]) for part in PARTS}
    return {
        "seconds": median([one.seconds for one in rounds]),
        "decode_step_us": median([one.step_us for one in rounds]),
        "decode_tokens_per_second": median([one.decode_tokens_per_second for one in rounds]),
        "parts_us": parts,
        "between_steps_us": sum(parts[part] for part in BETWEEN),
        "host_us": sum(parts.values()) - parts["wait"],
    }


def report(
    runner: ModelRunner,
    measured: dict[str, list[Round]],
    reason: str,
    num_prompts: int,
    length: int,
    new: int,
) -> dict[str, Any]:
    """Print what was measured; the same for a file."""
    device = runner.context.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else machine.processor()
    answer: dict[str, Any] = {
        "device": name or machine.machine(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "decision": runner.decision.summary(),
        "prompts": num_prompts,
        "prompt_tokens": length,
        "new_tokens": new,
        "ways": {way: summary(rounds) for way, rounds in measured.items()},
    }
    print(f"{answer['device']}, torch {torch.__version__}, transformers {transformers.__version__}")
    print(answer["decision"])
    print(f"{num_prompts} prompts of {length} tokens, {new} new ones each\n")
    print_table(answer["ways"])
    if "graphs" not in measured:
        answer["no_graphs"] = reason
        print(f"\nno graphs: {reason}")
        return answer
    pairs = list(zip(measured["eager"], measured["graphs"], strict=True))
    answer["decode_ratio"] = median([eager.step_us / graph.step_us for eager, graph in pairs])
    answer["whole_ratio"] = median([eager.seconds / graph.seconds for eager, graph in pairs])
    answer["same_tokens"] = statistics.mean(
        ours == theirs
        for eager, graph in pairs
        for ours, theirs in zip(eager.tokens, graph.tokens, strict=True)
    )
    print(f"\neager / graphs: decode steps {answer['decode_ratio']:.2f}", end=", ")
    print(f"prefill and decode {answer['whole_ratio']:.2f}")
    print(f"prompts with the same tokens both ways: {answer['same_tokens']:.1%}")
    return answer


def print_table(ways: dict[str, dict[str, Any]]) -> None:
    def row(title: str, read: Callable[[dict[str, Any]], float], note: str = "") -> None:
        figures = "".join(f"{read(way):>14,.1f}" for way in ways.values())
        print(f"{title:<28}{figures}  {note}")

    print(f"{'µs of a decode step':<28}" + "".join(f"{way:>14}" for way in ways))
    for part, meaning in PARTS.items():
        row(part, lambda way, part=part: way["parts_us"][part], meaning)  # type: ignore[misc]  # bound now
    row("whole step", lambda way: way["decode_step_us"])
    row("host, all but wait", lambda way: way["host_us"])
    row("host between two steps", lambda way: way["between_steps_us"], ", ".join(BETWEEN))
    row("decode tokens/s", lambda way: way["decode_tokens_per_second"])


if __name__ == "__main__":
    main()
