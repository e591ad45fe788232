"""Prompts that several ranks split, each with the whole model: the text of one rank."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from attnmux.core import InvalidInput, LayerGroup, Plugins, Policy, Request
from attnmux.core.cli.verbs import verbs
from attnmux.core.find.cpu import probe_cpu
from attnmux.distributed import RankGroup
from attnmux.emulators.ranks import run_ranks
from attnmux.transformers import (
    Engine,
    ModelRunner,
    NgramProposer,
    Prompt,
    RunnerOptions,
    load_runner,
    open_checkpoint,
    run_prompts,
)
from attnmux.transformers.parallel import launch
from attnmux.transformers.parallel.prefill import TOKENS_EACH, PrefillParallelRanks, ZigzagSteps
from attnmux.transformers.requests.sequence import SequenceState

OPTIONS = {"max_batch_size": 4, "max_context_len": 64, "max_total_tokens": 192, "dtype": "float32"}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {"page_size": 4},
    "deepseek-v3": {"page_size": 4},
    "gemma3": {},
    "gpt-oss": {"window_step_tokens": 40},
}


class Counting(ZigzagSteps):
    """Notes how many requests the split steps have."""

    def __init__(self, group: RankGroup) -> None:
        super().__init__(group, 2 * group.size)
        self.split_steps: list[int] = []

    def _part(self, step):
        self.split_steps.append(step.batch.batch_size)
        return super()._part(step)


def prompts_of(seed: int) -> list[list[int]]:
    """Some that begin alike, and more than run at a time."""
    draw = random.Random(seed)
    found = [[draw.randrange(97) for _ in range(draw.randrange(1, 33))] for _ in range(4)]
    found.append([draw.randrange(97) for _ in range(30)])
    return [*found, [*found[-1][:17], 5], [*found[-1], 7, 8]]


def loaded(group: RankGroup, folder: Path, **changes: object) -> ModelRunner:
    offers = [one for one in Plugins.load().offers() if one.card.name == "torch_native"]
    ranks = PrefillParallelRanks(group, least_tokens=2 * group.size)
    ranks.steps = Counting(group)
    options = RunnerOptions(**{**OPTIONS, "ranks": ranks, **changes})
    return load_runner(open_checkpoint(folder), probe_cpu(), offers, options)


def generated(
    runner: ModelRunner, prompts: Sequence[Sequence[int]], **engine: object
) -> list[tuple[int, ...]]:
    made = Engine(runner, prefill_tokens=40, **engine)
    results = []
    for some in (prompts[:-1], prompts[-1:]):
        asked = [Prompt(token_ids=list(ids), max_new_tokens=6) for ids in some]
        results += run_prompts(made, asked).results
    assert made.stats.reused_tokens
    made.clear_cache()
    assert made.memory.free == runner.steps.allocator.size
    return [result.token_ids for result in results]


def every_text(
    group: RankGroup, folders: dict[str, Path], prompts: Sequence[Sequence[int]]
) -> dict[str, list[tuple[int, ...]]]:
    """What each model generates on this rank, and with what was tried on the first."""
    found = {}
    for name, folder in folders.items():
        runner = loaded(group, folder, **ARCHITECTURES[name])
        found[name] = generated(runner, prompts)
        split = runner.ranks.steps.split_steps
        assert max(split) > 1, "no step of several prompts was split"
        assert len(split) >= 3
    runner = loaded(group, folders["llama"], draft_tokens=4)
    found["drafts"] = generated(runner, prompts, drafts=NgramProposer(draft_token_num=4))
    check_logits_of_first(runner)
    check_short_prompts(runner)
    check_construction(group)
    check_command(group)
    return found


def check_logits_of_first(runner: ModelRunner) -> None:
    """Ranks that round otherwise go on alike, in split steps and in others."""
    ranks, rank = runner.ranks, runner.ranks.rank
    for length in (3, 20):
        state = SequenceState(token_ids=list(range(length)))
        step = runner.steps.extend([state])
        _, kept = ranks.steps.begin(step, step.last_indices)
        logits = ranks.steps.end(torch.full((len(kept), 97), float(rank + 1)), 1)
        assert logits.shape == (1, 97)
        assert bool((logits == 1).all())
        runner.release([state])


def check_short_prompts(runner: ModelRunner) -> None:
    ranks = runner.ranks
    for lens, is_split in (((3, 3, 3), False), ((1, 4), True)):
        states = [SequenceState(token_ids=[1] * length) for length in lens]
        before = len(ranks.steps.split_steps)
        runner.extend(states)
        assert len(ranks.steps.split_steps) - before == is_split
        runner.release(states)


def check_construction(group: RankGroup) -> None:
    with pytest.raises(InvalidInput, match="expected at least 4, a token for each of 2 chunks"):
        PrefillParallelRanks(group, least_tokens=3)
    ranks = PrefillParallelRanks(group)
    assert ranks.steps.least_tokens == 2 * TOKENS_EACH
    for changes, match in (
        ({"linear_layers": (("gdn", 2),)}, "got linear layers"),
        ({"other_layers": [LayerGroup(layers=1, head_dim=8)]}, "got layers of several shapes"),
        ({"deterministic": True}, "got a deterministic request"),
    ):
        with pytest.raises(InvalidInput, match=f"pcp: expected attention in every layer.*{match}"):
            ranks.building.solve(Request(**changes), probe_cpu(), (), Policy(), ())
    chosen = Request(sparse="quest", sparse_budget=64, page_size=16)
    with pytest.raises(InvalidInput, match="sparse: expected None with pcp"):
        ranks.building.solve(chosen, probe_cpu(), (), Policy(), ())


def check_command(group: RankGroup) -> None:
    """As the ranks run it that `attnmux generate --pcp 2` starts."""
    options = ["--pcp", "2", "--pcp-min-tokens", "4", "--backend", "torch_native"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHELASTIC_RUN_ID", "test")
        done = CliRunner().invoke(verbs, ["generate", "The key is K77. ?K", *options])
        other = CliRunner().invoke(verbs, ["generate", "?", "--pcp", "3"])
    assert done.exit_code == 0, done.output
    assert done.stdout == ("" if group.rank else "77\n")
    said = "prompts of 4 tokens or more are split over 2 ranks: torch_native (cpu) serves extend"
    assert (said in done.stderr) == (not group.rank)
    assert "--pcp: expected 2, the processes that were started, got 3" in other.stderr


def test_the_command_starts_the_ranks(monkeypatch) -> None:
    started = []

    def run_ranks(arguments, size, stdout) -> int:
        started.append((arguments, size))
        return 3

    monkeypatch.setattr(launch, "run_ranks", run_ranks)
    monkeypatch.setattr(sys, "argv", ["attnmux", "generate", "text", "--pcp", "2"])
    assert CliRunner().invoke(verbs, sys.argv[1:]).exit_code == 3
    assert started == [(("-m", "attnmux.core", "generate", "text", "--pcp", "2"), 2)]


@pytest.mark.turns(3, suite="ranks")
def test_the_text_is_that_of_one_rank(tiny, tmp_path: Path) -> None:
    prompts = prompts_of(11)
    folders, expected = {}, {}
    for name in ARCHITECTURES:
        model, folders[name] = tiny(name)
        expected[name] = [
            tuple(
                model.generate(torch.tensor([ids]), max_new_tokens=6, do_sample=False)[0].tolist()[
                    len(ids) :
                ]
            )
            for ids in prompts
        ]
    expected["drafts"] = expected["llama"]
    for found in run_ranks(every_text, 2, tmp_path, folders, prompts):
        assert found == expected


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--pcp", "2", "--tp", "2"], "--pcp: expected --pcp alone"),
        (["--pcp", "2", "--dcp"], "got --dcp too"),
        (["--pcp", "2", "--canary", "1"], "got --canary or --keep-failures too"),
        (["--pcp-min-tokens", "9"], "--pcp-min-tokens: expected --pcp, whose prompts it splits"),
    ],
)
def test_options_that_exclude_each_other(options, said) -> None:
    done = CliRunner().invoke(verbs, ["generate", "text", *options])
    assert done.exit_code == 2
    assert said in done.output
