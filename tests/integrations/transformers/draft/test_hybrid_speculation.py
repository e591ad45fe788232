"""Drafts for models with linear layers: the text is that without drafts, whatever is guessed."""

from __future__ import annotations

import random

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

from attnmux.core import InvalidInput, NoBackend, Offer, Plugins, PoolExhausted
from attnmux.parts import DraftTree
from attnmux.testing import RecordingGraphs, fake_platform, graph_card
from attnmux.transformers import (
    Engine,
    MemoryBudget,
    ModelProposer,
    NgramProposer,
    Prompt,
    RunnerOptions,
    SamplingParams,
    load_runner,
    open_checkpoint,
    run_prompts,
)
from attnmux.transformers.engine import scheduler
from attnmux.transformers.model.eagle_head import EagleHead

NUM, DRAFTS, VOCABULARY = 12, 5, 97
SHARED = ("model.embed_tokens.weight", "lm_head.weight")


class HalfRight:
    """Chains of random lengths that hold the right continuation up to a random token."""

    draft_token_num, topk = DRAFTS, 1

    def __init__(self, prompts, answers):
        self.texts = [[*ids, *answer] for ids, answer in zip(prompts, answers, strict=True)]
        self.rng = random.Random(1)

    def propose(self, states, num_tokens):
        num = self.rng.randint(2, min(num_tokens, DRAFTS))
        return DraftTree.chains(torch.tensor([self._chain(one.token_ids, num) for one in states]))

    def keep_only(self, states):
        """Nothing is held."""

    def _chain(self, ids, num):
        text = next(text for text in self.texts if text[: len(ids)] == ids)
        right = [*text[len(ids) - 1 :], *[0] * num][:num]
        first_wrong = self.rng.randint(1, 2 * num)
        return right[:first_wrong] + [self.rng.randrange(VOCABULARY) for _ in right[first_wrong:]]


def some_prompts():
    """Some share a prefix, and one comes twice."""
    rng = random.Random(5)
    drawn = [[rng.randrange(VOCABULARY) for _ in range(num)] for num in (17, 3, 1, 9, 6)]
    return [*drawn[1:4], *(drawn[0] + more for more in drawn[1:]), drawn[3]]


def texts_of(engine, prompts, num=NUM, ways=()):
    asked = [
        Prompt(token_ids=ids, max_new_tokens=num, **({"sampling": ways[place]} if ways else {}))
        for place, ids in enumerate(prompts)
    ]
    return [one.token_ids for one in run_prompts(engine, asked).results]


@pytest.mark.parametrize(
    ("architecture", "page_size", "window"),
    [
        *[("qwen3-next", 1, None), ("mamba2", 4, None), ("lfm2", 1, None), ("jamba", 4, None)],
        ("kimi-linear", 4, None),
        *[("falcon-h1", 4, None), ("minimax", 1, None)],
        *[("zaya", 1, None), ("xlstm", 1, None), ("recurrent-gemma", 4, 8)],
        ("minimax-windows", 4, 8),
    ],
)
@pytest.mark.turns(4)
def test_greedy_text_is_that_without_drafts(
    tiny, run_hybrid, architecture, page_size, window, monkeypatch, alone
) -> None:
    """Prompts in chunks and with shared prefixes, and pools in which requests wait for others."""
    monkeypatch.setattr(scheduler, "GROWTH", 1)
    model, folder = tiny(architecture)
    prompts = some_prompts()
    expected = alone(model, prompts, NUM, use_cache=False)
    sizes = {"page_size": page_size, "max_total_tokens": 140, "kept_states": 3}
    runner = run_hybrid(folder, draft_tokens=DRAFTS, window_step_tokens=window, **sizes)
    assert (runner.sizes.swa is not None) == (window is not None)
    chunked = Engine(runner, drafts=HalfRight(prompts, expected), prefill_tokens=5)
    assert texts_of(chunked, prompts) == expected
    assert chunked.stats.drafts.accepted_tokens > 20
    whole = Engine(runner, drafts=NgramProposer(draft_token_num=DRAFTS))
    assert texts_of(whole, prompts) == expected
    assert chunked.stats.reused_tokens + whole.stats.reused_tokens > 0
    assert whole.memory.held == 0


@pytest.mark.parametrize("architecture", ["qwen3-next", "mamba2", "lfm2", "jamba"])
@pytest.mark.turns(2)
def test_steps_replayed_from_graphs_give_the_same_text(tiny, architecture, alone) -> None:
    """A stop id inside an accepted run too."""
    model, folder = tiny(architecture)
    prompts = some_prompts()
    expected = alone(model, prompts, NUM, use_cache=False)
    linear = [offer for offer in Plugins.load().offers() if offer.card.name == "torch_linear"]
    fake = Offer(card=graph_card(), plugin="fake", distribution="attnmux-fake", version="1.0")
    options = RunnerOptions(
        max_batch_size=4, max_context_len=64, max_total_tokens=512, draft_tokens=DRAFTS
    )
    runner = load_runner(open_checkpoint(folder), fake_platform(), [fake, *linear], options)
    runner.capture_graphs(batch_sizes=[1, 4], draft_tokens=DRAFTS, devices=RecordingGraphs())
    drafts, replayed = HalfRight(prompts, expected), []
    replay = runner.verify_graphs.replay
    runner.verify_graphs.replay = lambda batch, *given, **more: (
        replayed.append(batch.batch_size) or replay(batch, *given, **more)
    )
    assert texts_of(Engine(runner, drafts=drafts), prompts) == expected
    assert min(replayed) < max(replayed) == 4
    stop = expected[1][3]
    engine = Engine(runner, drafts=drafts, stop_ids={stop})
    (result,) = run_prompts(engine, [Prompt(token_ids=prompts[1], max_new_tokens=NUM)]).results
    assert result.token_ids == expected[1][: expected[1].index(stop) + 1]
    # What the ended request left goes on from the state after its last token
    (again,) = texts_of(Engine(runner, drafts=drafts), [prompts[1]])
    assert again == expected[1]


def test_a_conversation_goes_on_from_the_last_accepted_token(tiny, run_hybrid, alone) -> None:
    model, folder = tiny("qwen3-next")
    runner = run_hybrid(folder, page_size=1, draft_tokens=DRAFTS)
    rng, ids, turns = random.Random(4), [], []
    for _ in range(3):
        ids = ids + [rng.randrange(VOCABULARY) for _ in range(4)]
        expected = alone(model, [ids], NUM // 2, use_cache=False)
        engine = Engine(runner, drafts=HalfRight([ids], expected))
        asked = [Prompt(token_ids=ids, max_new_tokens=NUM // 2)]
        (result,) = run_prompts(engine, asked).results
        assert [result.token_ids] == expected
        turns.append((len(ids), result.reused_tokens))
        ids = ids + list(result.token_ids)
    assert [reused for _, reused in turns] == [0, *(length - 5 for length, _ in turns[1:])]


@pytest.mark.parametrize("architecture", ["qwen3-next", "lfm2"])
def test_drafts_of_a_smaller_model(tiny, run_hybrid, run_on, architecture, alone) -> None:
    model, folder = tiny(architecture)
    prompts = some_prompts()
    expected = alone(model, prompts, NUM, use_cache=False)
    runner = run_hybrid(folder, draft_tokens=4)
    drafter = run_on(tiny("llama")[1], max_total_tokens=512, max_batch_size=4)
    drafts = ModelProposer(drafter, vocabulary_size=VOCABULARY, steps=3)
    engine = Engine(runner, drafts=drafts)
    assert texts_of(engine, prompts) == expected
    assert engine.stats.drafts.requests > 10


@pytest.fixture(scope="module")
def head_of(tmp_path_factory):
    """The folder of a random EAGLE head for a model."""

    def make(model):
        torch.manual_seed(7)
        config = LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=model.config.hidden_size, intermediate_size=48,
            num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        )  # fmt: skip
        tensors = {
            key.removeprefix("model."): torch.randn_like(value) * 0.2
            for key, value in EagleHead(config, bias=True).state_dict().items()
            if key not in SHARED
        }
        folder = tmp_path_factory.mktemp("head")
        save_file(tensors, folder / "model.safetensors")
        config.save_pretrained(folder)
        return folder

    return make


@pytest.mark.parametrize("architecture", ["qwen3-next", "mamba2", "lfm2"])
def test_drafts_of_an_eagle_head(tiny, run_hybrid, head_of, architecture, eagle, alone) -> None:
    model, folder = tiny(architecture)
    prompts = some_prompts()
    expected = alone(model, prompts, NUM, use_cache=False)
    runner = run_hybrid(folder, draft_tokens=4, hidden_states=True)
    drafter = eagle.a_head(runner, head_of(model), page_size=1)
    engine = Engine(runner, drafts=eagle.a_proposer(drafter, runner, 1))
    assert texts_of(engine, prompts) == expected
    assert engine.stats.drafts.requests > 10


def test_sampled_text_is_that_without_drafts(tiny, run_hybrid) -> None:
    _, folder = tiny("falcon-h1")
    prompts = some_prompts()
    ways = [SamplingParams(temperature=1.3, seed=place) for place in range(len(prompts))]
    runner = run_hybrid(folder, draft_tokens=DRAFTS)
    expected = texts_of(Engine(runner), prompts, ways=ways)
    engine = Engine(runner, drafts=HalfRight(prompts, expected))
    assert texts_of(engine, prompts, ways=ways) == expected
    assert engine.stats.drafts.accepted_tokens > 20


def test_what_is_refused(tiny, run_hybrid) -> None:
    _, folder = tiny("lfm2")
    with pytest.raises(NoBackend, match=r"3 conv \(with draft trees: .* spec_topk=1\)"):
        run_hybrid(folder, draft_tokens=4, draft_topk=4)
    runner = run_hybrid(folder, draft_tokens=4)
    with pytest.raises(InvalidInput, match=r"chains \(topk=1\): branches have no states"):
        Engine(runner, drafts=NgramProposer(draft_token_num=4, topk=2))
    with pytest.raises(InvalidInput, match=r"RunnerOptions\.draft_tokens=5"):
        Engine(runner, drafts=NgramProposer(draft_token_num=5))
    with pytest.raises(InvalidInput, match="linear layers with states of 0"):
        Engine(run_hybrid(folder), drafts=NgramProposer(draft_token_num=2))


def test_states_of_drafts_are_counted_into_the_memory(tiny, run_hybrid) -> None:
    _, folder = tiny("qwen3-next")
    plain, drafting = (
        run_hybrid(folder, draft_tokens=num).context.linear_states for num in (None, 3)
    )
    recurrent = sum(plain.state(layer.layer_id)[:5].nbytes for layer in plain.layers)
    line = sum(plain.conv(layer.layer_id)[:5].nbytes for layer in plain.layers)
    # Three more states of each request, and in place of its W - 1 = 3 inputs these and 3 more
    assert drafting.draft_nbytes == 3 * recurrent + 2 * line
    assert drafting.nbytes == plain.nbytes + drafting.draft_nbytes
    memory = MemoryBudget(nbytes=plain.nbytes + 1000)
    run_hybrid(folder, max_total_tokens=None, memory=memory)
    with pytest.raises(PoolExhausted, match="3 draft tokens of each request, next to a KV pool"):
        run_hybrid(folder, max_total_tokens=None, memory=memory, draft_tokens=3)
