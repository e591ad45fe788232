"""EAGLE heads: they draft from the target's hidden states, and the text is the target's alone."""

from __future__ import annotations

import json
import random

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from attnmux.core import InvalidInput
from attnmux.core.cli.verbs import verbs
from attnmux.testing import RecordingGraphs, graph_card
from attnmux.transformers import (
    Engine,
    ModelProposer,
    Prompt,
    SamplingParams,
    recall,
    run_prompts,
)
from attnmux.transformers.engine import scheduler
from attnmux.transformers.load.eagle_files import is_head, load_head
from attnmux.transformers.model.eagle_head import EagleHead

VOCABULARY, NUM = 97, 11
SHARED = ("model.embed_tokens.weight", "lm_head.weight")


@pytest.fixture(scope="module")
def head_of(tiny, tmp_path_factory):
    """The folder of a random head for a tiny target."""

    def make(name):
        model, _ = tiny(name)
        torch.manual_seed(7)
        width = model.config.hidden_size
        config = LlamaConfig(
            vocab_size=model.config.vocab_size, hidden_size=width, intermediate_size=48,
            num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        )  # fmt: skip
        head = EagleHead(config, bias=True)
        folder = tmp_path_factory.mktemp(f"head-{name}")
        tensors = {
            key.removeprefix("model."): torch.randn_like(value) * 0.2
            for key, value in head.state_dict().items()
            if key not in SHARED
        }
        save_file(tensors, folder / "model.safetensors")
        config.save_pretrained(folder)
        return folder

    return make


@pytest.mark.parametrize(
    ("target", "page_size", "topk"),
    [("llama", 1, 4), ("llama", 16, 1), ("deepseek-v3", 16, 4), ("gemma3", 1, 1)],
)
@pytest.mark.turns(4)
def test_greedy_text_is_that_of_each_prompt_alone(
    tiny, run_on, head_of, target, page_size, topk, monkeypatch, eagle
):
    """Prompts in chunks, shared prefixes, and pools in which requests wait and are retracted."""
    monkeypatch.setattr(scheduler, "GROWTH", 1)
    model, folder = tiny(target)
    prompts = eagle.some_prompts()
    expected = eagle.alone(model, prompts)
    runner = run_on(
        folder, page_size=page_size, draft_tokens=8, draft_topk=topk, max_total_tokens=128,
        hidden_states=True, window_step_tokens=None,
    )  # fmt: skip
    drafter = eagle.a_head(runner, head_of(target), page_size=page_size)
    drafts = eagle.a_proposer(drafter, runner, topk)
    for options in ({}, {"prefill_tokens": 5, "prefix_cache": False}):
        engine = Engine(runner, drafts=drafts, **options)
        assert eagle.texts_of(engine, prompts) == expected
        assert engine.stats.drafts.requests > 10
        assert drafter.steps.allocator.available_size() == drafter.steps.allocator.size


class Statement:
    """What a head says after a path, by its own modules over whole sequences."""

    def __init__(self, model, head):
        self.model, self.head = model, head
        self.known = {}

    def target(self, ids):
        """The target's states of each token."""
        if (key := tuple(ids)) not in self.known:
            self.known[key] = self.model.model(torch.tensor([ids])).last_hidden_state[0]
        return self.known[key]

    @torch.no_grad()
    def scores(self, ids, path):
        """Log-probabilities [vocabulary] after the tokens and a path of drafts."""
        states = self.target(ids[:-1])
        tokens = ids[1:]
        for token in [*path, None]:
            joined = torch.cat([self.head.model.embed_tokens(torch.tensor(tokens)), states], dim=-1)
            out = self.head.model(inputs_embeds=self.head.fc(joined)[None]).last_hidden_state[0]
            if token is not None:
                tokens, states = [*tokens, token], torch.cat([states, out[-1:]])
        return self.head.lm_head(out[-1]).log_softmax(-1)


@pytest.mark.parametrize(
    ("page_size", "topk", "graphs"),
    [
        (1, 1, False),
        (1, 4, False),
        (16, 4, True),
        (1, 1, True),
        (1, 4, True),
        (16, 4, False),
    ],
)
@pytest.mark.turns(12)
def test_scores_are_those_of_the_head_alone(tiny, run_on, head_of, page_size, topk, graphs, eagle):
    """After prompts, accepted drafts, reused prefixes, and branches that continue others."""
    model, folder = tiny("llama")
    runner = run_on(
        folder, page_size=page_size, draft_tokens=8, draft_topk=topk, max_total_tokens=512,
        max_batch_size=6, hidden_states=True,
    )  # fmt: skip
    drafter = eagle.a_head(runner, head_of("llama"), page_size=page_size, card=graph_card())
    drafts = eagle.a_proposer(drafter, runner, topk)
    if graphs:
        drafts.capture_graphs(batch_sizes=[1, 6], devices=RecordingGraphs())
        both = drafts._loop.graphs, drafter.catch_up_graphs
        for each in both:
            each.replay = eagle.Counted(each.replay)
    head = load_head(head_of("llama"), model)
    head.set_attn_implementation("eager")
    statement = Statement(model, head)
    expected = eagle.alone(model, eagle.some_prompts(3), 7)
    eagle.check_scores(drafts, statement, runner, expected)
    assert not graphs or min(each.replay.count for each in both) > 3


def test_the_shipped_head_guesses_the_answers(run_on, eagle):
    rng = random.Random(3)
    cases = [recall.make_prompt(rng, rng.randrange(30, 200)) for _ in range(8)]
    runner = run_on(
        recall.PATH, max_context_len=256, max_total_tokens=2048, draft_tokens=4, dtype="float32",
        hidden_states=True,
    )  # fmt: skip
    drafter = eagle.a_head(runner, recall.EAGLE_PATH, max_context_len=256, max_total_tokens=4096)
    drafts = ModelProposer(drafter, vocabulary_size=258, steps=3, target=runner.steps)
    engine = Engine(runner, drafts=drafts)
    engine.stop_ids = frozenset({256})
    ids = {engine.add(list(p.encode()), max_new_tokens=6): answer for p, answer in cases}
    said = {}
    while engine.has_work:
        for output in engine.step():
            said.setdefault(output.request_id, []).append(output.token_id)
    for number, answer in ids.items():
        assert bytes(token for token in said[number] if token < 256).decode() == answer
    assert engine.stats.drafts.accepted_per_step > 1.5


def wrong_width(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "hidden_size": 64}))


def wrong_vocabulary(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 98}))


def without(name):
    def change(folder):
        tensors = load_file(folder / "model.safetensors")
        del tensors[name]
        save_file(tensors, folder / "model.safetensors")

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (wrong_width, "hidden_size 64"),
        (wrong_vocabulary, "vocab_size 98"),
        (without("layers.0.self_attn.q_proj.weight"), "q_proj.weight is missing"),
    ],
    ids=["width", "vocabulary", "tensor"],
)
def test_files_of_something_else(tiny, head_of, change, said):
    model, target_folder = tiny("llama")
    folder = head_of("llama")
    assert is_head(folder)
    assert not is_head(target_folder)
    change(folder)
    with pytest.raises(InvalidInput, match=said):
        load_head(folder, model)


def test_weights_that_torch_saved(tiny, head_of):
    model, _ = tiny("llama")
    folder = head_of("llama")
    tensors = load_file(folder / "model.safetensors")
    wanted = load_head(folder, model).state_dict()
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    assert is_head(folder)
    found = load_head(folder, model).state_dict()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_files_that_cannot_be_read(tiny, tmp_path, name):
    (tmp_path / name).write_bytes(b"\x08 nothing")
    with pytest.raises(InvalidInput, match="draft: expected the files of an EAGLE head"):
        is_head(tmp_path)


def test_sampled_text_is_the_same(tiny, run_on, head_of, eagle):
    folder = tiny("llama")[1]
    runner = run_on(folder, draft_tokens=8, draft_topk=4, max_total_tokens=256, hidden_states=True)
    drafts = eagle.a_proposer(eagle.a_head(runner, head_of("llama")), runner, 4)

    def texts(**given):
        asked = [
            Prompt(token_ids=ids, max_new_tokens=NUM, sampling=SamplingParams(seed=place))
            for place, ids in enumerate(eagle.some_prompts(4))
        ]
        return [one.token_ids for one in run_prompts(Engine(runner, **given), asked).results]

    assert texts(drafts=drafts) == texts()


def test_biases_of_queries_keys_and_values_alone(tiny, head_of):
    """As the heads of Qwen2 have them."""
    model, _ = tiny("llama")
    folder = head_of("llama")
    tensors = load_file(folder / "model.safetensors")
    for part, rows in (("q", 32), ("k", 16), ("v", 16)):
        tensors[f"layers.0.self_attn.{part}_proj.bias"] = torch.randn(rows)
    save_file(tensors, folder / "model.safetensors")
    attention = load_head(folder, model).model.layers[0].self_attn
    assert torch.equal(
        attention.q_proj.bias, tensors["layers.0.self_attn.q_proj.bias"].to(model.dtype)
    )
    assert not attention.o_proj.bias.any()


def test_the_command_drafts_by_the_shipped_head():
    """On one of its prompts, all of the answer is guessed."""
    text, answer = recall.make_prompt(random.Random(4), 80)
    given = ["generate", "--json", "--draft", "eagle", "--steps", "3", "--device", "cpu", text]
    ended = CliRunner().invoke(verbs, given)
    assert not ended.exit_code, ended.output
    said = json.loads(ended.stdout)
    assert [each["text"] for each in said["results"]] == [answer]
    assert said["drafts"]["accepted_tokens"] >= len(answer) - 1
