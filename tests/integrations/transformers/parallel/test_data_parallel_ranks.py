"""Ranks with requests of their own around layers that are split: the text of one rank."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from attnmux.core import GraphRunner, InvalidInput, Offer, Plugins
from attnmux.core.cli.verbs import verbs
from attnmux.core.find.cpu import probe_cpu
from attnmux.distributed import RankFailed, RankGroup, RanksDiffer
from attnmux.emulators.ranks import die, end_ranks, run_ranks
from attnmux.testing import RecordingGraphs, fake_platform, graph_card
from attnmux.transformers import (
    Engine,
    Generation,
    ModelRunner,
    NgramProposer,
    Prompt,
    RunnerOptions,
    load_runner,
    open_checkpoint,
    recall,
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
    offers = [one for one in Plugins.load().offers() if one.card.name == "torch_native"]
    ranks = DataParallelRanks(group)
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


def check_text(
    group: RankGroup,
    folder: Path,
    prompts: Sequence[Sequence[int]],
    expected: Tokens,
    **changes: object,
) -> ModelRunner:
    """Of many prompts, of an odd number in chunks, and of one alone."""
    runner = runner_of(group, folder, **changes)
    many, generation = generated(runner, prompts)
    assert many == expected
    assert generation.timings.prefill_tokens == sum(map(len, prompts))
    assert generation.stats.finished == len(prompts)
    assert generated(runner, prompts[:3], prefill_tokens=7)[0] == expected[:3]
    assert generated(runner, prompts[:1])[0] == expected[:1]
    return runner


def llama(group: RankGroup, folder: Path, prompts: list[list[int]], expected: Tokens) -> list[str]:
    runner = check_text(group, folder, prompts, expected)
    shapes = {name: tuple(each.shape) for name, each in runner.model.named_parameters()}
    assert shapes["model.layers.0.self_attn.q_proj.weight"] == (32, 32)
    assert shapes["model.layers.0.mlp.up_proj.weight"] == (48 // group.size, 32)
    assert shapes["model.layers.0.mlp.down_proj.weight"] == (32, 48 // group.size)
    assert runner.kv_tokens == runner.steps.allocator.size * group.size
    pieces: list[tuple[int, str, bool]] = []
    tokenizer = open_checkpoint(recall.PATH).require_tokenizer()
    asked = [Prompt(token_ids=ids, max_new_tokens=3) for ids in prompts[:3]]
    generation = run_prompts(
        Engine(runner, tokenizer=tokenizer), asked, on_text=lambda *piece: pieces.append(piece)
    )
    for place, result in enumerate(generation.results):
        assert "".join(text for index, text, _ in pieces if index == place) == result.text
        assert [index for index, _, last in pieces if last].count(place) == 1
    engine = Engine(runner)
    with pytest.raises(InvalidInput, match="drafts: expected none if ranks have requests"):
        Engine(runner, drafts=NgramProposer(draft_token_num=4))
    with pytest.raises(RanksDiffer) as other:
        run_prompts(engine, [Prompt(token_ids=[1] * (2 + group.rank), max_new_tokens=1)])
    if group.rank == 0:  # a server's loop, in which one rank has a request
        engine.add(prompts[0], max_new_tokens=new_tokens(0))
        with pytest.raises(InvalidInput, match="idle: expected `step` instead"):
            engine.idle()
        found = [output.token_id for _ in range(new_tokens(0)) for output in engine.step()]
        assert tuple(found) == expected[0]
        assert not engine.idle()
    else:
        assert [engine.idle() for _ in range(new_tokens(0) + 1)] == [True] * new_tokens(0) + [False]
    return [str(other.value)]


@pytest.mark.turns(3, suite="ranks")
def test_the_text_is_that_of_one_rank(tiny, tmp_path: Path) -> None:
    model, folder = tiny("llama")
    prompts = prompts_of(3, 9)
    for (other,) in run_ranks(llama, 2, tmp_path, folder, prompts, alone(model, prompts)):
        assert "rank 0: prompts of [[1, 1]]; rank 1: prompts of [[1, 1, 1]]" in other


def deepseek(group: RankGroup, folder: Path, prompts: list[list[int]], expected: Tokens) -> None:
    runner = check_text(group, folder, prompts, expected, mla="absorbed")
    shapes = {name: tuple(each.shape) for name, each in runner.model.named_parameters()}
    mlp = "model.layers.1.mlp"
    assert shapes[f"{mlp}.experts.gate_up_proj"] == (4, 32 // group.size, 32)
    assert shapes[f"{mlp}.shared_experts.down_proj.weight"] == (32, 16 // group.size)
    assert shapes[f"{mlp}.gate.weight"] == (4, 32)


@pytest.mark.turns(3, suite="ranks")
def test_the_text_of_experts_and_latent_attention(tiny, tmp_path: Path) -> None:
    model, folder = tiny("deepseek-v3")
    prompts = prompts_of(5, 5)
    run_ranks(deepseek, 2, tmp_path, folder, prompts, alone(model, prompts))


def in_graphs(group: RankGroup, folder: Path, prompts: list[list[int]], expected: Tokens) -> None:
    """All ranks replay the same sizes, also one without requests."""
    checkpoint = open_checkpoint(folder)
    offer = Offer(card=graph_card(), plugin="fake", distribution="attnmux-fake", version="1.0")
    ranks = DataParallelRanks(group)
    options = RunnerOptions(**OPTIONS, page_size=4, ranks=ranks)
    runner = load_runner(checkpoint, fake_platform(), [offer], options)
    runner.capture_graphs(batch_sizes=[1, 2, 4], devices=RecordingGraphs())
    replays = counting(runner.graphs)
    assert generated(runner, prompts)[0] == expected
    many = len(replays)
    assert generated(runner, prompts[:1])[0] == expected[:1]
    assert replays[many:] == [(1 - group.rank, 1)] * (new_tokens(0) - 1)
    told = [[size for _, size in each] for each in group.exchange(replays)]
    assert told[0] == told[1]
    assert set(told[0]) == {1, 2, 4}


def counting(graphs: GraphRunner) -> list[tuple[int, int]]:
    """Requests and size of each replay from now on."""
    replays, replay = [], graphs.replay

    def counted(batch, inputs=None, *, size):
        replays.append((batch.batch_size, size))
        return replay(batch, inputs or {}, size=size)

    graphs.replay = counted
    return replays


@pytest.mark.turns(3, suite="ranks")
def test_graphs_are_replayed_on_all_ranks(tiny, tmp_path: Path) -> None:
    model, folder = tiny("llama")
    prompts = prompts_of(8, 9)
    run_ranks(in_graphs, 2, tmp_path, folder, prompts, alone(model, prompts))


def fails(group: RankGroup, folder: Path, refused: Path) -> str:
    """A model whose experts get other rows than tokens is refused; a rank dies in the middle."""
    with pytest.raises(InvalidInput, match="dp_attention: expected layers that get one row for"):
        runner_of(group, refused)
    runner = runner_of(group, folder)
    engine = Engine(runner)
    if group.rank == 1:
        assert engine.idle()
        die()
    engine.add([1, 2, 3], max_new_tokens=9)
    engine.step()
    with pytest.raises(RankFailed) as info:
        run_to_end(engine)
    return str(info.value)


def run_to_end(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


def test_a_rank_that_dies_is_an_error_within_the_time(tiny, tmp_path: Path) -> None:
    folders = [tiny(name)[1] for name in ("llama", "llama4")]
    first, second = end_ranks(fails, 2, tmp_path, *folders, seconds=20.0)
    assert not first.error, first.error
    assert second.exit_code == -9
    assert "exchanging numbers: another rank ended or did not arrive within 20 s" in first.value


def commanded(group: RankGroup, options: list[str]) -> tuple[int, str, str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHELASTIC_RUN_ID", "as a launcher's ranks have it")
        done = CliRunner().invoke(verbs, ["generate", *options])
    return done.exit_code, done.stdout, done.stderr


@pytest.mark.turns(3, suite="ranks")
def test_generate(tmp_path: Path) -> None:
    """On ranks that run already; `--tp` starts them in test_several_ranks.py."""
    asked = [f"The key is K{key}. ?K" for key in (77, 31, 90)]
    options = ["--tp", "2", "--dp-attention", "--page-size", "4", "--backend", "torch_native"]
    first, second = run_ranks(commanded, 2, tmp_path, [*asked, *options])
    texts = [f"==> prompt {number} <==\n{key}\n" for number, key in ((1, 77), (2, 31), (3, 90))]
    assert first[:2] == (0, "".join(texts)), first[2]
    assert "2 ranks: KV memory for" in first[2]
    assert second == (0, "", "")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--dcp"], "--dcp: expected --tp with 2 ranks or more, got 1 rank"),
        (
            ["--tp", "1", "--dp-attention"],
            "--dp-attention: expected --tp with 2 ranks or more, got 1 rank",
        ),
        (["--tp", "2", "--dp-attention", "--dcp"], "--dcp: expected one of the two"),
        (["--tp", "2", "--dp-attention", "--draft", "ngram"], "--draft: expected no drafts"),
    ],
)
def test_generate_refuses(tmp_path: Path, options: list[str], said: str) -> None:
    ran = CliRunner().invoke(verbs, ["generate", "?", *options])
    assert ran.exit_code == 2
    assert said in ran.stderr
