"""Steps that verify drafts: their time, the host's work between two of them, and tokens a second.

    python -m benchmarks.speculation [--random 3b | --model FOLDER] [--backend NAME] [--batch 1,32]
                                     [--drafts 4] [--topk 1] [--length 240] [--new 64] [--rounds 3]
                                     [--page-size N] [--device DEVICE] [--chat] [--json FILE]

Greedy, without stop ids and prefix cache, from graphs where there are any. The ways take turns on
one runner and generate the same number of tokens:

- `plain`: decode steps without drafts.
- `wrong`: each step verifies drafts that cost no time to make, and rejects them.
- `ngram`: each step verifies drafts by n-gram lookup, on prompts that repeat themselves.
- `paced`: the same lookup in those steps in which it pays, as the engine does by itself.

With `--chat`, prompts are the questions of `tools.real_model`, as chats, as many at a time as
`--batch` says; answers end at the model's stop ids.

The first figure is the model's call of one request, with the root and `--drafts` drafts, compared
with a plain decode step. The table is of decode steps in which all prompts take part.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import click
import torch
from benchmarks.cases import json_option, rounds_option
from benchmarks.engine import BETWEEN, RANDOM, MetadataClock, load, make_prompts, make_random

from attnmux.core import GraphUnsupported, Policy
from attnmux.parts import DraftTree
from attnmux.testing.bench import Report, facts, interleave
from attnmux.transformers import (
    Engine,
    ModelRunner,
    NgramProposer,
    RunnerOptions,
    SequenceState,
    encode_prompts,
    open_checkpoint,
    recall,
)
from attnmux.transformers.draft.proposers import Proposer
from attnmux.transformers.draft.verify_step import VerifyStep
from attnmux.transformers.requests.sequence import Step
from attnmux.transformers.run.stats import PARTS
from tools.real_model.__main__ import QUESTIONS

WARM_UP_STEPS = 4
"""Steps of each run that are not counted."""


class WrongProposer:
    """Always guesses one token that the model has not generated lately."""

    def __init__(self, draft_token_num: int, topk: int) -> None:
        self.draft_token_num, self.topk = draft_token_num, topk

    def propose(self, states: Sequence[SequenceState], num_tokens: int) -> DraftTree | None:
        """See `Proposer`."""
        num = min(num_tokens, self.draft_token_num)
        if num < 2:
            return None
        tokens = torch.zeros(len(states), num, dtype=torch.int64)
        tokens[:, 0] = torch.tensor([state.token_ids[-1] for state in states])
        if self.topk == 1:
            return DraftTree.chains(tokens)
        parents = (torch.arange(num) - 1).div(self.topk, rounding_mode="floor")
        return DraftTree.of(tokens, parents.expand_as(tokens), topk=self.topk)

    def look_back(self, state: SequenceState, begin: int) -> None:
        """See `Proposer`."""

    def keep_only(self, states: Collection[SequenceState]) -> None:
        """Nothing is held."""


@click.command(context_settings={"show_default": True})
@click.option("--batch", "batches", default="1,32", help="Prompts at a time, separated by commas.")
@click.option("--drafts", type=click.IntRange(min=1), default=4, help="Besides the root.")
@click.option("--topk", type=click.IntRange(min=1), default=1)
@click.option("--length", type=click.IntRange(min=8), default=240, help="Tokens of a prompt.")
@click.option("--new", type=click.IntRange(min=16), default=64, help="Tokens to generate for each.")
@rounds_option(3)
@click.option("--model", default=str(recall.PATH), help="A folder or a hub id.")
@click.option("--random", "shape", type=click.Choice([*RANDOM]), help="A random Llama instead.")
@click.option("--backend", default=None)
@click.option("--device", default=None)
@click.option("--page-size", type=int, default=None)
@click.option("--chat", is_flag=True, help="Questions instead of random prompts.")
@json_option
def main(
    batches: str,
    drafts: int,
    topk: int,
    length: int,
    new: int,
    rounds: int,
    model: str,
    shape: str | None,
    backend: str | None,
    device: str | None,
    page_size: int | None,
    chat: bool,
    path: Path | None,
) -> None:
    """Print the ratio of a verifying step to a plain one, and the parts of steps in each way."""
    sizes = [int(size) for size in batches.split(",")]
    options = RunnerOptions(
        max_batch_size=max(sizes),
        max_context_len=length + new + drafts,
        max_total_tokens=max(sizes) * (length + new + drafts),
        draft_tokens=drafts + 1,
        draft_topk=topk,
        page_size=page_size,
        device=device,
        graph=False,
        policy=Policy(backend=backend),
    )
    runner = load(open_checkpoint(model), options) if shape is None else make_random(shape, options)
    reason = ""
    try:
        runner.capture_graphs(batch_sizes=sizes, draft_tokens=drafts + 1, draft_topk=topk)
    except GraphUnsupported as error:
        reason = str(error)
    clock = MetadataClock(runner)
    ends: Collection[int] = ()
    if chat:
        asked = list(islice(cycle(QUESTIONS), max(len(QUESTIONS), *sizes)))
        checkpoint = open_checkpoint(model)
        prompts = encode_prompts(checkpoint, asked, max_context_len=length, chat=True)
        ends = checkpoint.stop_ids(runner.model)
    else:
        prompts = [copying(ids) for ids in make_prompts(runner, max(sizes), length)]
    wrong = WrongProposer(drafts + 1, topk)
    ways: dict[str, Proposer | None] = {"plain": None, "wrong": wrong}
    ways["ngram"] = ways["paced"] = NgramProposer(draft_token_num=drafts + 1, topk=topk)
    calls = interleave(model_calls(runner, prompts[0], wrong), 10 * rounds, warm_up=3)
    taken: dict[str, list[dict[str, float]]] = {}

    def measure(name: str, way: str, size: int) -> float:
        figures = run(
            runner,
            prompts if chat else prompts[:size],
            new,
            partial(
                Engine,
                drafts=ways[way],
                draft_always=way != "paced",
                stop_ids=ends,
                max_running=size,
            ),
            clock,
        )
        taken.setdefault(name, []).append(figures)
        return figures["whole step"]

    names = {f"{way} {size}": (way, size) for size in sizes for way in ways}
    interleave(
        {name: partial(measure, name, *one) for name, one in names.items()}, rounds, warm_up=1
    )
    found = {name: medians(figures[1:]) for name, figures in taken.items()}
    about = facts(
        runner.context.device,
        *("transformers", "attnmux-core"),
        decision=runner.decision.summary(),
        graphs=runner.verify_graphs is not None,
        drafts=drafts,
        topk=topk,
        prompt_tokens=length,
        new_tokens=new,
    )
    title = (
        f"{runner.decision.summary()}\n{drafts} drafts, topk {topk}; the way and the number of "
        f"prompts; us of a decode step, medians of {rounds} rounds"
    )
    with Report({"": "", **dict.fromkeys(names, ",.1f")}, about, path, title=title) as report:
        for row in found[next(iter(names))]:
            report.add(row, *(figures[row] for figures in found.values()))
    if reason:
        report.note(f"without graphs: {reason}")
    ratio = 1 / calls.ratio("decode", "verify")
    report.save(step_ratio=ratio, call_us=calls.us)
    us = {way: statistics.median(each) for way, each in calls.us.items()}
    report.note(
        f"model's call, one request: {us['verify']:,.0f} us with {drafts} drafts, "
        f"{us['decode']:,.0f} us plain, ratio {ratio:.3f} (bar 1.15)"
    )
    for size in sizes:
        plain, *drafted = (found[f"{way} {size}"] for way in ("plain", "ngram", "paced"))
        gains = {
            f"{way}_{unit}_{size}": one[unit] / plain[unit]
            for way, one in zip(("ngram", "paced"), drafted, strict=True)
            for unit in ("tokens/s", "tokens/CPU s")
        }
        between = found[f"wrong {size}"]["host between two steps"]
        report.save(**gains, **{f"between_us_{size}": between})
        report.note(
            f"{size} prompts: {between:,.0f} us of the host between two steps (bar 150); "
            + ", ".join(f"{name} {gain:.3f} times plain" for name, gain in gains.items())
        )


def copying(ids: list[int]) -> list[int]:
    """A prompt of the same length that repeats its first eighth."""
    part = max(len(ids) // 8, 1)
    return (ids[:part] * (len(ids) // part + 1))[: len(ids)]


def model_calls(
    runner: ModelRunner, prompt: list[int], wrong: WrongProposer
) -> dict[str, Callable[[], float]]:
    """One step of each kind, run again and again."""
    steps: dict[str, Step] = {}
    for kind in ("decode", "verify"):
        state = SequenceState(token_ids=prompt[:])
        runner.extend([state])
        state.token_ids.append(1)
        if kind == "decode":
            steps[kind] = runner.steps.decode([state])
        else:
            tree = wrong.propose([state], wrong.draft_token_num)
            assert tree is not None
            steps[kind] = VerifyStep([state], tree, runner.steps, runner.verify_graphs).step
        runner.release([state])

    def call(step: Step) -> float:
        began = time.perf_counter()
        runner.forward(step, step.last_indices)[0, 0].item()
        return (time.perf_counter() - began) * 1e6

    return {kind: partial(call, step) for kind, step in steps.items()}


def run(
    runner: ModelRunner,
    prompts: list[list[int]],
    new: int,
    make: Callable[..., Engine],
    clock: MetadataClock,
) -> dict[str, float]:
    """Generate for all prompts. The figures are of the decode steps after the first few."""
    engine = make(runner, prefill_tokens=sum(map(len, prompts)), prefix_cache=False)
    for ids in prompts:
        engine.add(ids, max_new_tokens=new)
    while engine.has_work and engine.stats.decode.steps < WARM_UP_STEPS:
        engine.step()
    engine.stats.reset()
    clock.seconds = 0.0
    cpu_seconds = 0.0
    while engine.has_work:
        steps, began = engine.stats.decode.steps, time.process_time()
        engine.step()
        if engine.stats.decode.steps > steps:
            cpu_seconds += time.process_time() - began
    decode, accepted = engine.stats.decode, engine.stats.drafts.accepted_per_step
    parts = {str(part): spent / decode.steps * 1e6 for part, spent in decode.parts.items()}
    if runner.verify_graphs is not None:
        parts["metadata"] = clock.seconds / decode.steps * 1e6
        parts["launch"] -= parts["metadata"]
    return {
        **{str(part): parts[part] for part in PARTS},
        "host between two steps": sum(parts[part] for part in BETWEEN),
        "the same, with drafting": sum(parts[part] for part in (*BETWEEN, "draft")),
        "whole step": decode.seconds / decode.steps * 1e6,
        "accepted a step": accepted,
        "tokens/s": decode.new_tokens / decode.seconds,
        "tokens/CPU s": decode.new_tokens / cpu_seconds,
    }


def medians(rounds: list[dict[str, float]]) -> dict[str, Any]:
    """Of each figure."""
    return {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}


if __name__ == "__main__":
    main()
