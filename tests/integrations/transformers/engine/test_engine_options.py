"""Options of the engine: log probabilities, graph sizes, options of backends, what is ignored."""

from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner
from transformers import GenerationConfig

from attnmux.core import InvalidInput, Offer
from attnmux.core.cli.verbs import verbs
from attnmux.testing import RecordingGraphs, fake_platform, graph_card
from attnmux.transformers import (
    Engine,
    NgramProposer,
    Prompt,
    load_runner,
    open_checkpoint,
    run_prompts,
)
from attnmux.transformers.load.generation_config import ignored_sampling
from attnmux.transformers.options import RunnerOptions
from attnmux.transformers.requests.sampling_params import SamplingParams

IDS = [5, 9, 31, 4]


@pytest.fixture
def runner(tiny, run_on):
    return run_on(tiny("llama")[1], max_total_tokens=256)


def generate(*args: str):
    return CliRunner().invoke(verbs, ["generate", "a", *args], prog_name="attnmux")


def test_log_probabilities_are_the_models(tiny, runner) -> None:
    model = tiny("llama")[0]
    sampling = SamplingParams(temperature=1.5, seed=3, logprobs=2)
    plain = SamplingParams(temperature=1.5, seed=3)
    prompts = [
        Prompt(token_ids=IDS, max_new_tokens=5, sampling=sampling),
        Prompt(token_ids=IDS[:2], max_new_tokens=4, sampling=plain),
        Prompt(token_ids=IDS, max_new_tokens=3, sampling=SamplingParams(logprobs=0)),
    ]
    first, second, third = run_prompts(Engine(runner), prompts).results
    with torch.no_grad():
        logits = model(torch.tensor([[*first.prompt_ids, *first.token_ids]])).logits[0]
    expected = logits[len(IDS) - 1 : -1].float().log_softmax(-1)
    assert len(first.logprobs) == len(first.token_ids)
    for told, token, row in zip(first.logprobs, first.token_ids, expected, strict=True):
        assert told.token_id == token
        assert told.logprob == pytest.approx(row[token].item(), abs=1e-3)
        values, ids = row.topk(2)
        assert [one for one, _ in told.top] == ids.tolist()
        assert [one for _, one in told.top] == pytest.approx(values.tolist(), abs=1e-3)
    assert second.logprobs == ()
    assert [told.top for told in third.logprobs] == [()] * 3


def test_log_probabilities_of_drafts_are_refused(tiny, run_on) -> None:
    runner = run_on(tiny("llama")[1], draft_tokens=4)
    engine = Engine(runner, drafts=NgramProposer(draft_token_num=4))
    with pytest.raises(InvalidInput, match="logprobs"):
        engine.add(IDS, max_new_tokens=2, sampling=SamplingParams(logprobs=1))
    with pytest.raises(InvalidInput, match="logprobs"):
        SamplingParams(logprobs=-1)


@pytest.mark.parametrize(("pads", "size"), [(True, 4), (False, None)])
def test_steps_are_padded_to_a_captured_size_or_run_eagerly(tiny, pads, size) -> None:
    offer = Offer(card=graph_card(), plugin="fake", distribution="attnmux-fake", version="1.0")
    options = RunnerOptions(max_batch_size=4, max_context_len=64, max_total_tokens=256)
    folder = tiny("llama")[1]
    runner = load_runner(open_checkpoint(folder), fake_platform(), [offer], options)
    runner.capture_graphs(batch_sizes=[1, 4], pads=pads, devices=RecordingGraphs())
    seen = []
    size_for = runner.graphs.size_for

    def noted(batch):
        seen.append((batch.batch_size, size_for(batch)))
        return seen[-1][1]

    runner.graphs.size_for = noted
    prompts = [Prompt(token_ids=IDS, max_new_tokens=n) for n in (4, 3, 2)]
    run_prompts(Engine(runner), prompts)
    assert {(2, size), (1, 1)} <= set(seen)


def test_sizes_of_graphs_are_checked() -> None:
    with pytest.raises(InvalidInput, match="ascending"):
        RunnerOptions(max_batch_size=1, max_context_len=9, graph_sizes=(4, 2))
    assert generate("--graph-sizes", "1,x").exit_code == 2
    assert "--piece-sizes: expected sizes" in generate("--piece-sizes", "64,x").output


def test_the_command_prints_log_probabilities_and_sets_options() -> None:
    result = generate("--json", "--logprobs", "1", "--max-new-tokens", "2")
    (told,) = json.loads(result.stdout)["results"]
    assert [one["token_id"] for one in told["logprobs"]] == told["token_ids"]
    assert "--json with it" in generate("--logprobs", "1").stderr
    wrong = generate("--set", "torch_native.tile=1", "--max-new-tokens", "1")
    assert wrong.exit_code == 2
    assert "torch_native" in wrong.stderr


@pytest.mark.parametrize(
    ("stated", "said"),
    [
        ({}, ""),
        ({"temperature": 0.6}, ""),
        ({"do_sample": True, "temperature": 0.6, "top_k": 20}, "--temperature 0.6 follows"),
        ({"do_sample": True, "top_p": 0.9}, "top_p 0.9; --top-p 0.9"),
        ({"repetition_penalty": 1.1}, "repetition_penalty 1.1"),
    ],
)
def test_sampling_that_is_ignored_is_said(tiny, stated, said) -> None:
    model = tiny("llama")[0]
    before = model.generation_config
    model.generation_config = GenerationConfig(**stated)
    try:
        found = ignored_sampling(model)
    finally:
        model.generation_config = before
    assert said in found
    assert bool(said) == bool(found)
