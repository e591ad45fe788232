"""The engine on this CPU against transformers' own `generate`, with the same random weights.

    python -m benchmarks.generate [--batch 1 ...] [--dtype bfloat16 ...] [--length 32] [--new 8]
                                  [--rounds 3] [--threads N] [--backend NAME] [--json FILE]

The model has the shape of Qwen2.5-0.5B. Both sides take turns with the same prompts, all in one
step, greedily and without a stop id; transformers attends by torch's SDPA. The first token ends the
prompts' time. Times are of the CPU, of all threads together, so that other work on the machine
counts little: a figure is the median of the rounds, a ratio the median of the rounds' ratios.
Random weights have close logits: the share of the same tokens says how often roundings decide.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from benchmarks.cases import json_option, rounds_option, threads_option
from transformers import AutoModelForCausalLM, Qwen2Config

from attnmux.bench import Report, Times, facts, interleave
from attnmux.core import Plugins, Policy, Settings
from attnmux.core.verbs import Run
from attnmux.transformers import Capacity, Engine, ModelRunner, RunnerOptions, ServedModel
from attnmux.transformers.cli.run import platform_for
from attnmux.transformers.load.decision import decide
from attnmux.transformers.model.asked import request_of
from attnmux.transformers.model.attention import SERVED
from attnmux.transformers.model.layers import record_layers

CONFIG = Qwen2Config(
    vocab_size=151936,
    hidden_size=896,
    intermediate_size=4864,
    num_hidden_layers=24,
    num_attention_heads=14,
    num_key_value_heads=2,
    tie_word_embeddings=True,
    bos_token_id=None,
    eos_token_id=None,
)
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
COLUMNS = {
    "dtype": "",
    "batch": "",
    "decode, engine": ".2f",
    "decode, transformers": ".2f",
    "decode ratio": ".2f",
    "prompts, engine": ".1f",
    "prompts, transformers": ".1f",
    "prompts ratio": ".2f",
    "same tokens": ".0%",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """What one side generated, with seconds of CPU time."""

    tokens: list[list[int]]
    prompts: float
    decode: float
    """All tokens but the first."""


class Clock:
    """CPU time at each step's end. A stopping criterion of `generate`, which never stops."""

    def __init__(self) -> None:
        self.marks = [time.process_time()]

    def mark(self) -> None:
        self.marks.append(time.process_time())

    def __call__(self, ids: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        self.mark()
        return torch.zeros(len(ids), dtype=torch.bool)

    def round(self, tokens: list[list[int]]) -> Round:
        first, second, last = self.marks[0], self.marks[1], self.marks[-1]
        return Round(tokens=tokens, prompts=second - first, decode=last - second)


def engine_side(module: Any, options: RunnerOptions, prompts: torch.Tensor) -> Callable[[], Round]:  # noqa: ANN401  # a model
    plugins = Plugins.load()
    platform = platform_for(Run(), plugins, Settings.load(), "cpu")
    layers = record_layers(module, max_context_len=options.max_context_len)
    decision = decide(request_of(layers, module.dtype), platform, plugins.offers(), options)
    capacity = Capacity(
        max_batch_size=options.max_batch_size,
        max_context_len=options.max_context_len,
        max_total_tokens=options.max_total_tokens,
    )
    runner = ModelRunner(ServedModel(module=module, layers=layers), decision, capacity)
    new = options.max_context_len - prompts.shape[1]

    def run() -> Round:
        engine, clock = Engine(runner, prefill_tokens=prompts.numel(), prefix_cache=False), Clock()
        for prompt in prompts.tolist():
            engine.add(prompt, max_new_tokens=new)
        found: dict[int, list[int]] = {}
        while engine.has_work:
            for output in engine.step():
                if output.result is not None:
                    found[output.request_id] = list(output.result.token_ids)
            clock.mark()
        return clock.round([found[number] for number in sorted(found)])

    return run


def transformers_side(module: Any, new: int, prompts: torch.Tensor) -> Callable[[], Round]:  # noqa: ANN401  # a model
    def run() -> Round:
        clock = Clock()
        with torch.inference_mode():
            ids = module.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                max_new_tokens=new,
                do_sample=False,
                pad_token_id=0,
                stopping_criteria=[clock],
            )
        return clock.round(ids[:, prompts.shape[1] :].tolist())

    return run


def timed(sides: Mapping[str, Callable[[], Round]], rounds: int) -> dict[str, list[Round]]:
    found: dict[str, list[Round]] = {side: [] for side in sides}

    def measure(side: str) -> float:
        found[side].append(sides[side]())
        return 0.0

    interleave({side: partial(measure, side) for side in sides}, rounds, warm_up=1)
    return {side: taken[1:] for side, taken in found.items()}


def measure(
    name: str, batch: int, length: int, new: int, rounds: int, backend: str | None, report: Report
) -> None:
    ours: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]  # transformers
        deepcopy(CONFIG), dtype=DTYPES[name], attn_implementation=SERVED
    ).eval()
    theirs = deepcopy(ours, {id(weight): weight for weight in ours.parameters()})
    theirs.set_attn_implementation("sdpa")
    prompts = torch.randint(0, CONFIG.vocab_size, (batch, length))
    options = RunnerOptions(
        max_batch_size=batch,
        max_context_len=length + new,
        max_total_tokens=batch * (length + new),
        graph=False,
        policy=Policy(backend=backend),
    )
    found = timed(
        {
            "engine": engine_side(ours, options, prompts),
            "transformers": transformers_side(theirs, new, prompts),
        },
        rounds,
    )
    prompt = Times(us={side: [one.prompts for one in took] for side, took in found.items()})
    decode = Times(us={side: [one.decode for one in took] for side, took in found.items()})
    tokens = [torch.tensor([one.tokens for one in took]) for took in found.values()]
    same = (tokens[0] == tokens[1]).float().mean()
    report.add(
        name,
        str(batch),
        *(batch * (new - 1) / decode.median(side) for side in found),
        decode.ratio("transformers", "engine"),
        *(batch * length / prompt.median(side) for side in found),
        prompt.ratio("transformers", "engine"),
        float(same),
    )


@click.command(context_settings={"show_default": True})
@click.option("--batch", "batches", type=click.IntRange(1), multiple=True, default=(1, 16))
@click.option("--dtype", "names", type=click.Choice([*DTYPES]), multiple=True, default=[*DTYPES])
@click.option("--length", type=click.IntRange(1), default=32, help="Tokens of a prompt.")
@click.option("--new", type=click.IntRange(2), default=8, help="Tokens to generate for each.")
@rounds_option(3)
@threads_option
@click.option("--backend", default=None)
@json_option
def main(
    batches: tuple[int, ...],
    names: tuple[str, ...],
    length: int,
    new: int,
    rounds: int,
    backend: str | None,
    path: Path | None,
) -> None:
    """Print tokens per second of CPU time of the engine and of transformers' `generate`."""
    title = (
        f"tokens/s, {torch.get_num_threads()} threads, prompts of {length} tokens, {new} new ones "
        f"each; medians of {rounds} rounds"
    )
    with Report(COLUMNS, facts(torch.device("cpu"), "transformers"), path, title=title) as report:
        for name in names:
            for batch in batches:
                measure(name, batch, length, new, rounds, backend, report)


if __name__ == "__main__":
    main()
