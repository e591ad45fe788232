"""A model on several ranks: the text of one rank, and errors that every rank understands."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest

from attnmux.core import InvalidInput, Plugins, Request, TunedLaunch
from attnmux.core.find.cpu import probe_cpu
from attnmux.core.verbs import Device
from attnmux.distributed import RankFailed, RankGroup, RanksDiffer
from attnmux.emulators.ranks import die, end_ranks, run_ranks
from attnmux.transformers import (
    Engine,
    NgramProposer,
    Prompt,
    RunnerOptions,
    load_runner,
    open_checkpoint,
    run_prompts,
)
from attnmux.transformers.load.decision import decide
from attnmux.transformers.parallel.ranks import InterleavedRanks, TensorParallelRanks

OPTIONS = {"max_batch_size": 4, "max_context_len": 64, "max_total_tokens": 192, "dtype": "float32"}


def prompts_of(seed: int, num: int) -> list[list[int]]:
    rng = random.Random(seed)
    found = [[rng.randrange(97) for _ in range(rng.randrange(1, 33))] for _ in range(num)]
    return [*found, [*found[0][:9], 5], [*found[0], 7, 8]]


def tuned(warps: int) -> TunedLaunch:
    return TunedLaunch(
        backend="a/b",
        device=Device.of(probe_cpu()),
        versions={},
        subject={},
        values={"warps": warps},
        median_us=1.0,
        date=datetime(2026, 1, 1, tzinfo=UTC),
    )


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
    offers = [one for one in Plugins.load().offers() if one.card.name == "torch_native"]
    options = {**OPTIONS, **changes}
    runner = load_runner(
        checkpoint,
        probe_cpu(),
        offers,
        RunnerOptions(
            **options, ranks=ranks, draft_tokens=drafts or None, launches=(tuned(group.rank),)
        ),
    )
    assert [each.values["warps"] for each in runner.context.launches] == [0]  # those of rank 0
    proposer = NgramProposer(draft_token_num=drafts) if drafts else None
    made = Engine(runner, drafts=proposer, **engine)
    asked = [Prompt(token_ids=list(ids), max_new_tokens=8) for ids in prompts]
    results = run_prompts(made, asked).results
    made.clear_cache()
    assert made.memory.free == runner.steps.allocator.size
    assert bool(made.stats.drafts.draft_tokens) is bool(drafts)
    return [result.token_ids for result in results], runner.decision.hash


@pytest.mark.parametrize(
    ("architecture", "size", "interleaved", "engine", "drafts", "changes"),
    [
        ("llama", 2, False, {"prefill_tokens": 7}, 0, {"page_size": 4}),
        ("llama", 4, False, {}, 4, {}),
        ("llama", 2, True, {"prefill_tokens": 7}, 4, {"page_size": 4}),
        ("llama", 4, True, {}, 0, {}),
        ("deepseek-v3", 2, False, {}, 0, {"page_size": 4}),
        ("deepseek-v3", 2, True, {"prefill_tokens": 7}, 0, {"page_size": 4}),
        ("deepseek-v3", 2, True, {"prefill_tokens": 7}, 4, {"page_size": 4, "mla": "absorbed"}),
        ("gpt-oss", 2, False, {}, 0, {}),
        ("gemma3", 2, False, {}, 0, {}),
    ],
)
@pytest.mark.turns(8)
def test_the_text_is_that_of_one_rank(
    tiny, tmp_path: Path, architecture, size, interleaved, engine, drafts, changes, alone
) -> None:
    model, folder = tiny(architecture)
    prompts = prompts_of(3, 6)
    found = run_ranks(
        generated, size, tmp_path, folder, prompts, interleaved, engine, drafts, changes
    )
    expected = alone(model, prompts, 8)
    assert [tokens for tokens, _ in found] == [expected] * size
    assert len({decision for _, decision in found}) == 1


def test_interleaved_ranks_refuse_chosen_pages(tiny) -> None:
    checkpoint, group = open_checkpoint(tiny("llama")[1]), SimpleNamespace(rank=0, size=2)
    given = {"sparse": "quest", "sparse_budget": 64, "page_size": 16}
    options = RunnerOptions(
        **{**OPTIONS, **given}, ranks=InterleavedRanks(group, checkpoint.config)
    )
    with pytest.raises(InvalidInput, match="sparse: expected None with dcp"):
        decide(Request(dtype="fp32", head_dim=16), probe_cpu(), Plugins.load().offers(), options)


def other_library(group: RankGroup, folder: Path) -> str:
    checkpoint = open_checkpoint(folder)
    patch = pytest.MonkeyPatch()
    if group.rank == 1:
        older = {"torch": ("2.0.0", "0123456789abcdef")}
        patch.setattr(Plugins, "installed", lambda names: older)
    with pytest.raises(RanksDiffer) as info:
        load_runner(
            checkpoint,
            probe_cpu(),
            Plugins.load().offers(),
            RunnerOptions(**OPTIONS, ranks=TensorParallelRanks(group, checkpoint.config)),
        )
    patch.undo()
    return str(info.value)


def test_ranks_with_other_libraries_are_an_error_on_each(tiny, tmp_path: Path) -> None:
    _, folder = tiny("llama")
    first, second = run_ranks(other_library, 2, tmp_path, folder)
    assert first == second
    assert "rank 1: " in first
    assert "torch 2.0.0 (01234567)" in first
    assert first.endswith("install the same distributions on every rank")


def other_prompt(group: RankGroup, folder: Path) -> tuple[str, int]:
    checkpoint = open_checkpoint(folder)
    ranks = TensorParallelRanks(group, checkpoint.config)
    options = RunnerOptions(**OPTIONS, ranks=ranks)
    engine = Engine(load_runner(checkpoint, probe_cpu(), Plugins.load().offers(), options))
    engine.add([1, 2, 3] + [4] * group.rank, max_new_tokens=3)
    with pytest.raises(RanksDiffer) as info:
        engine.step()
    return str(info.value), engine.runner.steps.allocator.available_size()


def test_other_lengths_are_an_error_on_each_before_the_step(tiny, tmp_path: Path) -> None:
    _, folder = tiny("llama")
    first, second = run_ranks(other_prompt, 2, tmp_path, folder)
    assert first == second
    assert "rank 0: extend of [[0, 3, 3, 0]]; rank 1: extend of [[0, 4, 4, 0]]" in first[0]


def run_to_end(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


def dying(group: RankGroup, folder: Path) -> tuple[str, float]:
    checkpoint = open_checkpoint(folder)
    ranks = TensorParallelRanks(group, checkpoint.config)
    options = RunnerOptions(**OPTIONS, ranks=ranks)
    engine = Engine(load_runner(checkpoint, probe_cpu(), Plugins.load().offers(), options))
    engine.add([1, 2, 3], max_new_tokens=9)
    engine.step()
    if group.rank == 1:
        die()
    began = time.monotonic()
    with pytest.raises(RankFailed) as info:
        run_to_end(engine)
    return str(info.value), time.monotonic() - began


def test_a_rank_that_dies_between_steps_is_an_error_within_the_time(tiny, tmp_path: Path) -> None:
    _, folder = tiny("llama")
    first, second = end_ranks(dying, 2, tmp_path, folder, seconds=5.0)
    assert second.exit_code == -9
    assert not first.error, first.error
    message, seconds = first.value
    assert "another rank ended or did not arrive within 5 s" in message
    assert seconds < 15


@pytest.mark.parametrize(
    ("architecture", "size", "said"),
    [("llama", 3, "tp: expected a divisor"), ("gpt2", 2, "which has no tp_plan")],
)
def test_models_that_cannot_be_split(tiny, tmp_path: Path, architecture, size, said) -> None:
    _, folder = tiny(architecture)
    for result in end_ranks(generated, size, tmp_path, folder, [[1]], False, {}, 0, {}):
        assert "InvalidInput" in result.error
        assert said in result.error


@pytest.mark.turns(3, suite="ranks")
def test_generate_on_two_ranks(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "attnmux.core", "generate", "The key is K77. ?K"]
    options = ["--tp", "2", "--dcp", "--page-size", "4", "--backend", "torch_native"]
    options += ["--draft", "ngram"]
    done = subprocess.run(
        [*command, *options], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "77\n"
    assert "2 ranks: KV memory for" in done.stderr
