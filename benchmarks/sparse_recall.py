"""Decoding over chosen pages: what the shipped model still recalls.

    python -m benchmarks.sparse_recall [--device cpu|cuda] [--prompts 64] [--page-size 16]
                                       [--json FILE]

Held-out prompts of 1,024 bytes, whose question and answer are decoded step by step, so that each of
their tokens reads a budget of 1, 2, 4 or 8 times fewer keys than the prompt has. An answer is right
if it is exactly the value and then ends.
"""

from __future__ import annotations

import random
from pathlib import Path

import click
import torch
from benchmarks.cases import json_option

from attnmux.core import Platform, Plugins
from attnmux.testing.bench import Report, facts
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
COLUMNS = {"fewer keys": "", "tokens read": "", "right": ""}


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
        runner = load_runner(checkpoint, platform, Plugins.load().offers(), options)
        end = next(iter(checkpoint.stop_ids(runner.model)))
        said = answers(runner, ids)
        wanted = [[*value.encode(), end] for _, value in cases]
        pairs = zip(said, wanted, strict=True)
        right = sum(one[: len(value)] == value for one, value in pairs)
        read = "all" if factor == 1 else str(budget)
        report.add(f"{factor}x", read, f"{right}/{prompts}")


@click.command()
@click.option("--device", "name", default="cuda" if torch.cuda.is_available() else "cpu")
@click.option("--prompts", type=click.IntRange(1), default=64, show_default=True)
@click.option("--page-size", type=click.IntRange(2), default=16, show_default=True)
@json_option
def main(name: str, prompts: int, page_size: int, path: Path | None) -> None:
    """Print what is recalled with fewer keys."""
    device = torch.device(name)
    found = Plugins.load().detect().platforms
    platform = next(one for one in found if one.device_type == device.type)
    title = f"Quest, pages of {page_size}, prompts of {LENGTH} bytes"
    with Report(COLUMNS, facts(device, "attnmux-core"), path, title=title) as report:
        measure_recall(device, platform, prompts, page_size, report)


if __name__ == "__main__":
    main()
