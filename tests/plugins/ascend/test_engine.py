"""An engine whose decode steps run in an NPU's graphs, over an emulated torch-npu."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch

from attnmux.core import DeviceGraphs, Platform, Plugins
from attnmux.emulators.ascend.torch_npu import torch_npu
from attnmux.transformers import (
    Engine,
    ModelRunner,
    NgramProposer,
    Prompt,
    RunnerOptions,
    load_runner,
    open_checkpoint,
    recall,
    run_prompts,
)

ANSWERS = {
    "The red door opens with R417, the blue one with B92. ?R": "417",
    "k417 x9 k22 z1 ?z": "1",
    "a1 b2 ?b": "2",
}


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> ModelRunner:
    monkeypatch.setitem(sys.modules, "torch_npu", torch_npu())
    (offer,) = Plugins.load(("attnmux-ascend",), ()).offers()
    options = RunnerOptions(
        max_batch_size=4,
        max_context_len=128,
        max_total_tokens=1024,
        device="cpu",
        graph=False,
        draft_tokens=4,
    )
    ours = replace(offer, card=replace(offer.card, requires=()))
    made = load_runner(open_checkpoint(recall.PATH), Platform.parse("ascend:910b"), [ours], options)
    made.capture_graphs(draft_tokens=4, devices=DeviceGraphs.of(torch.device("cpu"), "npu"))
    return made


@pytest.mark.parametrize("drafts", [False, True], ids=["decode", "chains"])
def test_an_engine_answers_from_graphs(runner, drafts) -> None:
    tokenizer = open_checkpoint(recall.PATH).require_tokenizer()
    proposer = NgramProposer(draft_token_num=4) if drafts else None
    graphs = runner.verify_graphs if drafts else runner.graphs
    replays = []
    replay = graphs.replay
    graphs.replay = lambda *given, **more: replays.append(1) or replay(*given, **more)
    engine = Engine(
        runner,
        tokenizer=tokenizer,
        stop_ids=open_checkpoint(recall.PATH).stop_ids(runner.model),
        drafts=proposer,
        draft_always=True,
    )
    prompts = [Prompt(token_ids=tokenizer(text)["input_ids"], max_new_tokens=6) for text in ANSWERS]
    found = run_prompts(engine, prompts)
    assert [each.text for each in found.results] == list(ANSWERS.values())
    assert replays
