"""The engine's decode steps, eager, from graphs and compiled, and where the host's time goes.

    python -m benchmarks.engine [--prompts 64] [--length 240] [--new 128] [--rounds 5]
                                [--model FOLDER | --random 3b] [--compile] [--backend NAME]
                                [--page-size N] [--device DEVICE] [--stream] [--json FILE]

All ways take turns on one runner: the same prompts, the same number of tokens to generate, no stop
id, no prefix cache. `overlap` launches each step before the tokens of the one before are read. A
figure is the median of the rounds, a ratio the median of the rounds' ratios. Without device graphs
only the eager way is measured. The table is of decode steps in which all
prompts take part; in `wait` the host waits for the device's tokens, all else is work of the host.
`--stream` adds text to every step, by one callback a prompt. `--compile` adds the compiled layers,
in graphs where there are any, and times prompts without them and then with them.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from benchmarks.cases import json_option, rounds_option
from transformers import AutoModelForCausalLM, LlamaConfig

from attnmux.core import ForwardBatch, GraphRunner, GraphUnsupported, Plugins, Policy, Settings
from attnmux.core.verbs import Run
from attnmux.testing.bench import Report, Times, facts, interleave
from attnmux.transformers import (
    Checkpoint,
    Engine,
    ModelRunner,
    RunnerOptions,
    SequenceState,
    ServedModel,
    load_runner,
    open_checkpoint,
    recall,
)
from attnmux.transformers.cli.run import platform_for
from attnmux.transformers.load.decision import decide
from attnmux.transformers.model.asked import request_of
from attnmux.transformers.model.attention import SERVED
from attnmux.transformers.model.layers import record_layers
from attnmux.transformers.run.compiled import compile_layers, undo
from attnmux.transformers.run.stats import PARTS

BETWEEN = ("commit", "stream", "schedule", "allocate", "metadata")
"""From the tokens of one step to the launch of the next one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """One way to run, once."""

    seconds: float
    """All prompts, from the first `add` to the last token."""
    step_us: float
    """A decode step of all prompts."""
    decode_tokens_per_second: float
    parts_us: dict[str, float]
    """Its parts."""
    tokens: list[tuple[int, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """How decode steps run."""

    graphs: GraphRunner | None = None
    compiled: bool = False
    overlap: bool = False


RANDOM = {
    "tiny": (2, 64, 128, 4, 2),
    "3b": (28, 3072, 8192, 24, 8),
}
"""Random Llamas: layers, hidden and intermediate size, query and KV heads."""


class MetadataClock:
    """Times the backend's host work, which a graph's replay includes."""

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
@rounds_option(5)
@click.option("--model", default=str(recall.PATH), help="A folder or a hub id.")
@click.option("--random", "shape", type=click.Choice([*RANDOM]), help="A random Llama instead.")
@click.option("--compile", "compiled", is_flag=True)
@click.option("--backend", default=None)
@click.option("--device", default=None)
@click.option("--page-size", type=int, default=None)
@click.option("--stream", is_flag=True)
@json_option
def main(
    num_prompts: int,
    length: int,
    new: int,
    rounds: int,
    model: str,
    shape: str | None,
    compiled: bool,
    backend: str | None,
    device: str | None,
    page_size: int | None,
    stream: bool,
    path: Path | None,
) -> None:
    """Print the parts of a decode step in each way, and the ratios to the eager one."""
    options = RunnerOptions(
        max_batch_size=num_prompts,
        max_context_len=length + new,
        max_total_tokens=num_prompts * (length + new),
        window_step_tokens=max(length, 2048),  # a prompt alone is timed in one step
        page_size=page_size,
        device=device,
        graph=False,
        policy=Policy(backend=backend),
    )
    checkpoint = open_checkpoint(model)
    runner = load(checkpoint, options) if shape is None else make_random(shape, options)
    prompts = make_prompts(runner, num_prompts, length)
    clock = MetadataClock(runner)
    ways, compile_seconds, reason = make_ways(runner, compiled=compiled)
    found: dict[str, list[Round]] = {way: [] for way in ways}

    def take(way: str) -> None:
        if runner.is_compiled != ways[way].compiled:
            (compile_layers if ways[way].compiled else undo)(runner.model)
        runner.graphs, runner.is_compiled = ways[way].graphs, ways[way].compiled

    def measure(way: str) -> float:
        take(way)
        found[way].append(run(runner, checkpoint, prompts, new, clock, ways[way].overlap, stream))
        return found[way][-1].step_us

    def prefill() -> float:
        state = SequenceState(token_ids=prompts[0])
        began = time.perf_counter()
        runner.extend([state])[0, 0].item()
        spent = time.perf_counter() - began
        runner.release([state])
        return spent * 1e6

    times = interleave({way: partial(measure, way) for way in ways}, rounds, warm_up=1)
    measured = {way: taken[1:] for way, taken in found.items()}
    about = facts(
        runner.context.device,
        *("transformers", "attnmux-core"),
        decision=runner.decision.summary(),
        prompts=num_prompts,
        prompt_tokens=length,
        new_tokens=new,
    )
    fills: dict[str, float] = {}
    for way in ("eager", "compiled") if compiled else ():  # not in turns: a change compiles anew
        take(way)
        fills[way] = statistics.median([prefill() for _ in range(rounds + 2)][2:])
    title = (
        f"{runner.decision.summary()}\n{num_prompts} prompts of {length} tokens, {new} new ones "
        f"each; us of a decode step, medians of {rounds} rounds"
    )
    calls: dict[str, float] = {}
    for way in ways:
        take(way)
        calls[way] = back_to_back(runner, prompts, rounds)
    columns = {"": "", **dict.fromkeys(ways, ",.1f"), "meaning": ""}
    with Report(columns, about, path, title=title) as report:
        add_parts(report, {way: summary(taken) for way, taken in measured.items()})
        report.add(
            "model's calls, back to back", *calls.values(), "of the device, if it takes longer"
        )
    if "graphs" not in ways:
        report.note(f"no graphs: {reason}")
    for way in [*ways][1:]:
        report.save(**{way: compare(report, times, measured, way)})
    if compiled:
        ratio = fills["eager"] / fills["compiled"]
        report.save(compile_seconds=compile_seconds, prefill_us=fills, prefill_ratio=ratio)
        report.note(
            f"compiled in {compile_seconds:.1f} s; a prompt of {length} tokens alone: "
            f"{fills['eager'] / 1e3:.2f} ms eager, {fills['compiled'] / 1e3:.2f} ms compiled, "
            f"ratio {ratio:.2f}"
        )


def load(checkpoint: Checkpoint, options: RunnerOptions) -> ModelRunner:
    """The runner, eager so far, with room for all prompts at a time."""
    plugins = Plugins.load()
    platform = platform_for(Run(), plugins, Settings.load(), options.device)
    return load_runner(checkpoint, platform, plugins.offers(), options)


def random_config(
    shape: str, *, vocab_size: int = 32000, max_position_embeddings: int = 131072
) -> LlamaConfig:
    """The config of a Llama of one of the shapes in RANDOM."""
    num_layers, hidden, intermediate, q_heads, kv_heads = RANDOM[shape]
    return LlamaConfig(
        num_hidden_layers=num_layers,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_attention_heads=q_heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocab_size,
        max_position_embeddings=max_position_embeddings,
    )


def make_random(shape: str, options: RunnerOptions) -> ModelRunner:
    """A runner of a Llama with random weights, in bfloat16 on the device."""
    config = random_config(shape)
    plugins = Plugins.load()
    platform = platform_for(Run(), plugins, Settings.load(), options.device)
    with torch.device(options.device or platform.device_type):
        model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]  # transformers
            config, dtype=torch.bfloat16, attn_implementation=SERVED
        ).eval()
    layers = record_layers(model, max_context_len=options.max_context_len)
    decision = decide(request_of(layers, torch.bfloat16), platform, plugins.offers(), options)
    return ModelRunner(ServedModel(module=model, layers=layers), decision, options)


def make_prompts(runner: ModelRunner, num_prompts: int, length: int) -> list[list[int]]:
    """Random ids. The special ones, at the vocabulary's end, are left out."""
    rng = random.Random(0)
    top = min(runner.vocabulary_size, 256)
    return [[rng.randrange(1, top) for _ in range(length)] for _ in range(num_prompts)]


def make_ways(runner: ModelRunner, *, compiled: bool) -> tuple[dict[str, Way], float, str]:
    """The ways, the seconds that compiling took, and the reason why there are no graphs."""
    seconds = 0.0
    if compiled:  # before graphs are captured, since weights move when they are merged
        began = time.perf_counter()
        runner.compile()
        seconds = time.perf_counter() - began
        undo(runner.model)
        runner.is_compiled = False
    graphs, reason = capture(runner)
    ways = {"eager": Way()}
    if graphs is not None:
        ways["graphs"] = Way(graphs=graphs)
        ways["overlap"] = Way(graphs=graphs, overlap=True)
    if compiled:
        compile_layers(runner.model)
        runner.is_compiled = True
        ways["compiled"] = Way(compiled=True, graphs=capture(runner)[0])
        ways["compiled, overlap"] = replace(ways["compiled"], overlap=True)
    return ways, seconds, reason


def capture(runner: ModelRunner) -> tuple[GraphRunner | None, str]:
    """The captured graphs, or the reason why there are none."""
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
    overlap: bool,
    stream: bool,
) -> Round:
    """Generate for all prompts. Steps that run prompts are not in the parts."""
    tokenizer = checkpoint.require_tokenizer() if stream else None
    # All prompts in one step, so that all of them decode from the first step to the last.
    prefill_tokens = sum(map(len, prompts))
    engine = Engine(
        runner,
        tokenizer=tokenizer,
        prefill_tokens=prefill_tokens,
        prefix_cache=False,
        overlap=overlap,
    )
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


def back_to_back(runner: ModelRunner, prompts: list[list[int]], rounds: int) -> float:
    """Microseconds of the model's call for all prompts, one after another without a wait."""
    states = [SequenceState(token_ids=ids[:]) for ids in prompts]
    for state in states:
        runner.extend([state])
        state.token_ids.append(1)
    step, num = runner.steps.decode(states), 32
    taken = []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        for _ in range(num):
            logits = runner.forward(step, step.last_indices)
        logits[0, 0].item()
        taken.append((time.perf_counter() - began) / num * 1e6)
    runner.release(states)
    return statistics.median(taken[1:])


def hear(piece: str, last: bool) -> None:
    """A client that ignores the text."""


def summary(rounds: list[Round]) -> dict[str, float]:
    """Medians of one way, by row of the table."""
    median = statistics.median
    parts = {str(part): median(one.parts_us[part] for one in rounds) for part in PARTS}
    return {
        **parts,
        "whole step": median(one.step_us for one in rounds),
        "host, all but wait": sum(parts.values()) - parts["wait"],
        "host between two steps": sum(parts[part] for part in BETWEEN),
        "decode tokens/s": median(one.decode_tokens_per_second for one in rounds),
        "seconds in all": median(one.seconds for one in rounds),
    }


def add_parts(report: Report, ways: Mapping[str, Mapping[str, float]]) -> None:
    meanings = {str(part): meaning for part, meaning in PARTS.items()}
    meanings["host between two steps"] = ", ".join(BETWEEN)
    for name in ways["eager"]:
        report.add(name, *(figures[name] for figures in ways.values()), meanings.get(name, ""))


def compare(
    report: Report, times: Times, measured: dict[str, list[Round]], way: str
) -> dict[str, Any]:
    """Print the ratios of eager to a way, and how often both generate the same tokens."""
    whole = Times(us={name: [one.seconds * 1e6 for one in took] for name, took in measured.items()})
    pairs = zip(measured["eager"], measured[way], strict=True)
    answer = {
        "decode_ratio": times.ratio("eager", way),
        "whole_ratio": whole.ratio("eager", way),
        "same_tokens": statistics.mean(
            ours == theirs
            for eager, other in pairs
            for ours, theirs in zip(eager.tokens, other.tokens, strict=True)
        ),
    }
    report.note(
        f"eager / {way}: decode steps {answer['decode_ratio']:.2f}, "
        f"prefill and decode {answer['whole_ratio']:.2f}\n"
        f"prompts with the same tokens both ways: {answer['same_tokens']:.1%}"
    )
    return answer


if __name__ == "__main__":
    main()
