"""A model on several ranks: the text of one rank, and errors that every rank understands."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from attnmux.core import RankGroup, load_plugins
from attnmux.core.choosing.machine.cpu import probe_cpu
from attnmux.emulators.ranks import run_ranks
from attnmux.transformers import (
    Engine,
    NgramProposer,
    Prompt,
    RunnerOptions,
    load_runner,
    open_checkpoint,
    run_prompts,
)
from attnmux.transformers.parallel.ranks import InterleavedRanks, TensorParallelRanks

OPTIONS = {"max_batch_size": 4, "max_context_len": 64, "max_total_tokens": 192, "dtype": "float32"}


def prompts_of(seed: int, num: int) -> list[list[int]]:
    rng = random.Random(seed)
    found = [[rng.randrange(97) for _ in range(rng.randrange(1, 33))] for _ in range(num)]
    return [*found, [*found[0][:9], 5], [*found[0], 7, 8]]


def generated(
    group: RankGroup,
    folder: Path,
    prompts: Sequence[Sequence[int]],
    interleaved: bool,
    engine: dict[str, int],
    drafts: int,
    changes: dict[str, object],
) -> tuple[list[tuple[int, ...]], str]:
    checkpoint = open_checkpoint(folder)
    kind = InterleavedRanks if interleaved else TensorParallelRanks
    ranks = kind(group, checkpoint.config)
    offers = [one for one in load_plugins().offers() if one.card.name == "torch_native"]
    options = {**OPTIONS, **changes}
    runner = load_runner(
        checkpoint,
        probe_cpu(),
        offers,
        RunnerOptions(**options, ranks=ranks, draft_tokens=drafts or None),
    )
    proposer = NgramProposer(draft_token_num=drafts) if drafts else None
    made = Engine(runner, drafts=proposer, **engine)
    asked = [Prompt(token_ids=list(ids), max_new_tokens=8) for ids in prompts]
    results = run_prompts(made, asked).results
    made.clear_cache()
    assert made.memory.free == runner.steps.allocator.size
    return [result.token_ids for result in results], runner.decision.hash


def alone(model, prompts: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """What transformers' own attention generates for each."""
    found = []
    for ids in prompts:
        whole = model.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False)
        found.append(tuple(whole[0].tolist()[len(ids) :]))
    return found


@pytest.mark.parametrize(
    ("architecture", "size", "interleaved", "engine", "drafts", "changes"),
    [
        ("llama", 2, False, {"prefill_tokens": 7}, 0, {"page_size": 4}),
        ("llama", 4, False, {}, 4, {}),
        ("llama", 2, True, {"prefill_tokens": 7}, 0, {"page_size": 4}),
        ("llama", 4, True, {}, 0, {}),
        ("deepseek-v3", 2, False, {}, 0, {"page_size": 4}),
        ("deepseek-v3", 2, True, {"prefill_tokens": 7}, 0, {"page_size": 4}),
        ("deepseek-v3", 2, True, {"prefill_tokens": 7}, 0, {"page_size": 4, "mla": "absorbed"}),
        ("gpt-oss", 2, False, {}, 0, {}),
        ("gemma3", 2, False, {}, 0, {}),
    ],
)
def test_the_text_is_that_of_one_rank(
    tiny, tmp_path: Path, architecture, size, interleaved, engine, drafts, changes
) -> None:
    model, folder = tiny(architecture)
    prompts = prompts_of(3, 6)
    found = run_ranks(
        generated, size, tmp_path, folder, prompts, interleaved, engine, drafts, changes
    )
    expected = alone(model, prompts)
    assert [tokens for tokens, _ in found] == [expected] * size
    assert len({decision for _, decision in found}) == 1
