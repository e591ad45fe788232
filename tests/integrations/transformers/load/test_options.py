"""Options and arguments of the Python interface that nothing could run with."""

from __future__ import annotations

import pytest
import torch

from attnmux.core import InvalidInput
from attnmux.transformers import (
    Engine,
    NgramProposer,
    Prompt,
    RunnerOptions,
    SamplingParams,
    load_head,
    open_checkpoint,
    run_prompts,
)

SIZES = {"max_batch_size": 2, "max_context_len": 64, "max_total_tokens": 128}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"max_batch_size": 0}, "max_batch_size: expected at least 1, got 0"),
        ({"max_batch_size": 1.5}, "max_batch_size: expected a whole number, at least 1, got 1.5"),
        ({"max_context_len": None}, "max_context_len: expected a whole number.* got None"),
        ({"max_context_len": 0}, "max_context_len: expected at least 1"),
        ({"max_encoder_len": -5}, "max_encoder_len: expected at least 1"),
        ({"max_total_tokens": "128"}, "max_total_tokens: expected a whole number.* got '128'"),
        ({"page_size": 0}, "page_size: expected at least 1"),
        ({"window_step_tokens": 0}, "window_step_tokens: expected at least 1"),
        ({"kept_states": -1}, "kept_states: expected at least 0"),
        ({"spare_pages": -1}, "spare_pages: expected at least 0"),
        ({"draft_tokens": 1}, "draft_tokens: expected at least 2"),
        ({"draft_topk": 0, "draft_tokens": 4}, "draft_topk: expected at least 1"),
        ({"draft_topk": 3}, "draft_topk: expected draft_tokens with it"),
        ({"hidden_layers": (0,)}, "hidden_layers: expected hidden_states=True with it"),
        ({"mla": "no"}, 'mla: expected "absorbed", "expanded" or None, got \'no\''),
        ({"dtype": torch.float32}, 'dtype: expected a str, such as "bfloat16"'),
        ({"device": torch.device("cpu")}, "device: expected a str"),
        ({"memory": "1GB"}, "memory: expected a MemoryBudget, such as MemoryBudget.parse"),
        ({"policy": "triton"}, "policy: expected a Policy, such as Policy"),
    ],
)
def test_options_of_a_runner(changes, said):
    with pytest.raises(InvalidInput, match=said):
        RunnerOptions(**{**SIZES, **changes})


def test_a_device_that_torch_cannot_use(tiny, run_on):
    with pytest.raises(InvalidInput, match="device: expected a device that torch can use here"):
        run_on(tiny("llama")[1], device="nope")


def test_arguments_of_an_engine(tiny, run_on):
    runner = run_on(tiny("llama")[1])
    for given, said in (
        ({"max_running": "2"}, "max_running: expected a whole number"),
        ({"prefill_tokens": 2.5}, "prefill_tokens: expected a whole number"),
        ({"prefill_tokens": None}, "prefill_tokens: expected a whole number"),
        ({"stop_ids": 5}, "stop_ids: expected a list of token ids"),
        ({"stop_ids": ["</s>"]}, "stop_ids: expected a list of token ids"),
        ({"accept": 0.5}, "accept: expected AcceptThresholds"),
        ({"drafts": "ngram"}, "drafts: expected a Proposer, such as NgramProposer"),
    ):
        with pytest.raises(InvalidInput, match=said):
            Engine(runner, **given)
    engine = Engine(runner)
    for given, said in (
        ({"max_new_tokens": 1.5}, "max_new_tokens: expected a whole number"),
        ({"sampling": {"seed": 1}}, "sampling: expected SamplingParams"),
        ({"stop_ids": 5}, "stop_ids: expected a list of token ids"),
    ):
        with pytest.raises(InvalidInput, match=said):
            engine.add([1], **{"max_new_tokens": 2, **given})
    with pytest.raises(InvalidInput, match="request_id: expected an id"):
        engine.abort("0")
    one = Prompt(token_ids=[1], max_new_tokens=1)
    for prompts, said in ((one, "got a Prompt"), ([], "got none"), ([one, "b"], "prompt 2.*a str")):
        with pytest.raises(InvalidInput, match=said):
            run_prompts(engine, prompts)
    assert not engine.has_work


def test_drafts_that_the_backend_was_not_chosen_for(tiny, run_on):
    """It may have no masks, or verify nothing at all."""
    chains, trees = NgramProposer(draft_token_num=4), NgramProposer(draft_token_num=4, topk=2)
    plain, chained = run_on(tiny("llama")[1]), run_on(tiny("llama")[1], draft_tokens=4)
    for runner, drafts, said in (
        (plain, chains, "a runner with RunnerOptions.draft_tokens, got drafts, .* without any"),
        (plain, trees, "draft_tokens and draft_topk=2, got drafts, .* without any"),
        (chained, trees, "draft_topk=2, got drafts of 2 branches, .* without so many"),
    ):
        with pytest.raises(InvalidInput, match=said):
            Engine(runner, drafts=drafts)
    Engine(chained, drafts=chains)


def test_arguments_of_samples_and_guesses():
    for given, said in (
        ({"temperature": "1"}, "temperature: expected a number, got '1'"),
        ({"top_p": None}, "top_p: expected a number"),
        ({"seed": 1.5}, "seed: expected a whole number"),
    ):
        with pytest.raises(InvalidInput, match=said):
            SamplingParams(**given)
    with pytest.raises(InvalidInput, match="draft_token_num: expected a whole number"):
        NgramProposer(draft_token_num="8")


def test_a_home_of_nobody(tiny):
    with pytest.raises(InvalidInput, match=r"model: .*~nobody-here/model"):
        open_checkpoint("~nobody-here/model")
    with pytest.raises(InvalidInput, match="~nobody-here/head"):
        load_head("~nobody-here/head", tiny("llama")[0])
