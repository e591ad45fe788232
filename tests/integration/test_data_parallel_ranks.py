"""Ranks with requests of their own around layers that are split: the text of one rank."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from attnmux.core import InvalidInput, RankFailed, RankGroup, RanksDiffer, load_plugins
from attnmux.core.choosing.machine.cpu import probe_cpu
from attnmux.emulators.ranks import die, end_ranks, run_ranks
from attnmux.transformers import (
    Engine,
    Generation,
    ModelRunner,
    NgramProposer,
    Prompt,
    RunnerOptions,
    load_runner,
    open_checkpoint,
    run_prompts,
)
from attnmux.transformers.parallel.data_parallel import DataParallelRanks

OPTIONS = {"max_batch_size": 4, "max_context_len": 64, "max_total_tokens": 192, "dtype": "float32"}
Tokens = list[tuple[int, ...]]


def prompts_of(seed: int, num: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(97) for _ in range(rng.randrange(1, 33))] for _ in range(num)]


def alone(model, prompts: Sequence[Sequence[int]]) -> Tokens:
    """What transformers' own attention generates for each."""
    found = []
    for place, ids in enumerate(prompts):
        new = new_tokens(place)
        whole = model.generate(torch.tensor([ids]), max_new_tokens=new, do_sample=False)
        found.append(tuple(whole[0].tolist()[len(ids) :]))
    return found


def new_tokens(place: int) -> int:
    """Of each prompt, so that ranks end at other times."""
    return 4 + 3 * (place % 3)


def runner_of(group: RankGroup, folder: Path, **changes: object) -> ModelRunner:
    checkpoint = open_checkpoint(folder)
    offers = [one for one in load_plugins().offers() if one.card.name == "torch_native"]
    ranks = DataParallelRanks(group, checkpoint.config)
    options = RunnerOptions(**{**OPTIONS, "page_size": 4, **changes}, ranks=ranks)
    return load_runner(checkpoint, probe_cpu(), offers, options)


def generated(
    runner: ModelRunner, prompts: Sequence[Sequence[int]], **engine: int
) -> tuple[Tokens, Generation]:
    made = Engine(runner, **engine)
    asked = [
        Prompt(token_ids=list(ids), max_new_tokens=new_tokens(place))
        for place, ids in enumerate(prompts)
    ]
    generation = run_prompts(made, asked)
    made.clear_cache()
    assert made.memory.free == runner.steps.allocator.size
    return [result.token_ids for result in generation.results], generation


def generated_for(
    group: RankGroup, folder: Path, prompts: Sequence[Sequence[int]], changes: dict[str, object]
) -> list[Tokens]:
    """For many prompts, for an odd number in chunks, and for one alone."""
    runner = runner_of(group, folder, **changes)
    sizes = {name: tuple(each.shape) for name, each in runner.model.named_parameters()}
    ups = [shape for name, shape in sizes.items() if name.endswith("mlp.up_proj.weight")]
    inner = runner.model.config.intermediate_size
    assert {rows for rows, _ in ups} == {inner // group.size}
    many, counted = generated(runner, prompts)
    assert counted.timings.prefill_tokens == sum(map(len, prompts))
    assert counted.stats.finished == len(prompts)
    chunked, _ = generated(runner, prompts[:3], prefill_tokens=7)
    one, _ = generated(runner, prompts[:1])
    return [many, chunked, one]


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [("llama", {}), ("deepseek-v3", {}), ("deepseek-v3", {"mla": "absorbed"})],
)
def test_the_text_is_that_of_one_rank(tiny, tmp_path: Path, architecture, changes) -> None:
    model, folder = tiny(architecture)
    prompts = prompts_of(3, 9)
    expected = alone(model, prompts)
    for found in run_ranks(generated_for, 2, tmp_path, folder, prompts, changes):
        assert found == [expected, expected[:3], expected[:1]]
