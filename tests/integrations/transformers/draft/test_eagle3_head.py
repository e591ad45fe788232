"""EAGLE 3 heads, against a statement of whole sequences in plain torch."""

from __future__ import annotations

import json
import random
import shutil

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from torch.nn.functional import linear, silu
from transformers import Gemma3nForCausalLM, Gemma3nTextConfig, LlamaConfig

from attnmux.core import InvalidInput, Offer
from attnmux.core.cli.verbs import verbs
from attnmux.testing import RecordingGraphs, fake_platform, graph_card
from attnmux.transformers import (
    Engine,
    MemoryBudget,
    ModelProposer,
    Prompt,
    RunnerOptions,
    SamplingParams,
    hidden_layers,
    load_head,
    load_runner,
    open_checkpoint,
    recall,
    run_prompts,
)
from attnmux.transformers.engine import scheduler
from attnmux.transformers.load.eagle_files import head_folder, is_head

VOCABULARY, OWN_VOCABULARY, NUM = 97, 40, 11
HEADS, KV_HEADS, HEAD_DIM, MLP = 4, 2, 8, 48
LAYERS = "eagle_aux_hidden_state_layer_ids"


def random_head(width, *, layers, target_width=None):
    """(tensors, config) of a head, by the names of its authors' files."""
    generator = torch.Generator().manual_seed(11)

    def drawn(*shape):
        return torch.randn(shape, generator=generator) * 0.2

    target_width = target_width or width
    tensors = {
        "fc.weight": drawn(width, len(layers) * target_width),
        "midlayer.self_attn.q_proj.weight": drawn(HEADS * HEAD_DIM, 2 * width),
        "midlayer.self_attn.k_proj.weight": drawn(KV_HEADS * HEAD_DIM, 2 * width),
        "midlayer.self_attn.v_proj.weight": drawn(KV_HEADS * HEAD_DIM, 2 * width),
        "midlayer.self_attn.o_proj.weight": drawn(width, HEADS * HEAD_DIM),
        "midlayer.mlp.gate_proj.weight": drawn(MLP, width),
        "midlayer.mlp.up_proj.weight": drawn(MLP, width),
        "midlayer.mlp.down_proj.weight": drawn(width, MLP),
        "lm_head.weight": drawn(OWN_VOCABULARY, width),
    }
    for norm in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        tensors[f"midlayer.{norm}.weight"] = 1 + drawn(width)
    tensors["norm.weight"] = 1 + drawn(width)
    ids = torch.randperm(VOCABULARY, generator=generator)[:OWN_VOCABULARY].sort().values
    tensors["d2t"] = ids - torch.arange(OWN_VOCABULARY)
    tensors["t2d"] = torch.isin(torch.arange(VOCABULARY), ids)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_act": "silu",
        "hidden_size": width, "intermediate_size": MLP, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "num_hidden_layers": 1,
        "rms_norm_eps": 1e-5, "vocab_size": VOCABULARY, "draft_vocab_size": OWN_VOCABULARY,
        "max_position_embeddings": 2048, "tie_word_embeddings": False,
        "eagle_config": {"use_aux_hidden_state": True, LAYERS: list(layers)},
    }  # fmt: skip
    if target_width != width:
        config["target_hidden_size"] = target_width
        tensors["embed_tokens.weight"] = drawn(VOCABULARY, width)
    return tensors, config


def write(folder, tensors, config):
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def head_of(tiny, tmp_path):
    """The folder of a random head for a tiny target."""

    def make(name, *, layers=(0, 1), width=None):
        own = tiny(name)[0].config.hidden_size
        made = random_head(width or own, layers=layers, target_width=own)
        return write(tmp_path, *made)

    return make


def a_target(run_on, folder, head, **changes):
    layers = hidden_layers(head, open_checkpoint(folder).config)
    given = {"max_total_tokens": 512, "max_batch_size": 6, **changes}
    return run_on(folder, draft_tokens=8, hidden_states=True, hidden_layers=layers, **given)


def in_graphs(folder, head, *, page_size, topk):
    """The target with its decode and verify steps in graphs."""
    checkpoint = open_checkpoint(folder)
    offer = Offer(card=graph_card(), plugin="fake", distribution="attnmux-fake", version="1.0")
    options = RunnerOptions(
        max_batch_size=6, max_context_len=64, max_total_tokens=512, page_size=page_size,
        draft_tokens=8, draft_topk=topk, hidden_states=True, graph=False,
        hidden_layers=hidden_layers(head, checkpoint.config),
    )  # fmt: skip
    runner = load_runner(checkpoint, fake_platform(), [offer], options)
    runner.capture_graphs(draft_tokens=8, draft_topk=topk, devices=RecordingGraphs())
    return runner


def normed(x, weight):
    return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight


def turned(x):
    """Rotary embeddings of [T, heads, HEAD_DIM], base 10,000, halves apart."""
    half = HEAD_DIM // 2
    angles = torch.arange(len(x), dtype=x.dtype)[:, None, None] * 10_000.0 ** (
        -torch.arange(half, dtype=x.dtype) / half
    )
    first, second = x[..., :half], x[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Statement:
    """What a head says after a path, from the tensors of its file in float64."""

    def __init__(self, model, folder, layers):
        self.model, self.layers, self.known = model, layers, {}
        self.weights = {
            name: tensor.double()
            for name, tensor in load_file(folder / "model.safetensors").items()
        }
        own = self.weights.get("embed_tokens.weight")
        embeddings = model.get_input_embeddings().weight if own is None else own
        self.embeddings = embeddings.detach().double()
        places = torch.arange(OWN_VOCABULARY)
        self.ids = places + self.weights["d2t"].long()

    def target(self, ids):
        """Of each token, the outputs of the target's layers."""
        if (key := tuple(ids)) in self.known:
            return self.known[key]
        found = []
        hooks = [
            self.model.model.layers[number].register_forward_hook(
                lambda module, args, output: found.append(output[0])
            )
            for number in self.layers
        ]
        self.model(torch.tensor([ids]))
        for hook in hooks:
            hook.remove()
        return self.known.setdefault(key, torch.cat(found, dim=-1).double())

    def layer(self, tokens, features):
        def product(x, name):
            return linear(x, self.weights[f"midlayer.{name}.weight"])

        def norm(x, name):
            return normed(x, self.weights[f"midlayer.{name}.weight"])

        embeds = norm(self.embeddings[tokens], "input_layernorm")
        beside = torch.cat([embeds, norm(features, "hidden_norm")], dim=-1)
        num = len(tokens)
        q, k, v = (
            product(beside, f"self_attn.{part}_proj").view(num, -1, HEAD_DIM) for part in "qkv"
        )
        q, k = turned(q), turned(k).repeat_interleave(HEADS // KV_HEADS, dim=1)
        v = v.repeat_interleave(HEADS // KV_HEADS, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / HEAD_DIM**0.5
        hidden = torch.ones(num, num, dtype=torch.bool).triu(1)
        shares = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        attended = torch.einsum("hqk,khd->qhd", shares, v).flatten(1)
        states = features + product(attended, "self_attn.o_proj")
        x = norm(states, "post_attention_layernorm")
        gated = silu(product(x, "mlp.gate_proj")) * product(x, "mlp.up_proj")
        return states + product(gated, "mlp.down_proj")

    @torch.no_grad()
    def scores(self, ids, path):
        """Log-probabilities [vocabulary] after the tokens and a path of drafts."""
        features = linear(self.target(ids[:-1]), self.weights["fc.weight"])
        tokens = ids[1:]
        for token in [*path, None]:
            out = self.layer(torch.tensor(tokens), features)
            if token is not None:
                tokens, features = [*tokens, token], torch.cat([features, out[-1:]])
        own = linear(normed(out[-1], self.weights["norm.weight"]), self.weights["lm_head.weight"])
        whole = torch.full((VOCABULARY,), -torch.inf, dtype=own.dtype)
        whole[self.ids] = own.log_softmax(-1)
        return whole


def counted_graphs(runner, drafter, drafts, eagle):
    drafts.capture_graphs(batch_sizes=[1, 6], devices=RecordingGraphs())
    every = drafts._loop.graphs, drafter.catch_up_graphs, runner.verify_graphs
    for each in every:
        each.replay = eagle.Counted(each.replay)
    return every


@pytest.mark.parametrize(
    ("page_size", "topk", "layers", "width", "graphs"),
    [
        (1, 1, (0, 1, 2), None, False),
        (16, 4, (0, 1), None, False),
        (1, 4, (0, 2), 24, True),
        (1, 1, (0, 1, 2), None, True),
        (16, 4, (0, 1), None, True),
        (1, 4, (0, 2), 24, False),
    ],
)
@pytest.mark.turns(12)
def test_scores_are_those_of_the_statement(
    tiny, run_on, head_of, page_size, topk, layers, width, graphs, eagle
):
    """After prompts, accepted drafts, reused prefixes, and branches that continue others."""
    model, folder = tiny("llama")
    head = head_of("llama", layers=layers, width=width)
    if graphs:
        runner = in_graphs(folder, head, page_size=page_size, topk=topk)
    else:
        runner = a_target(run_on, folder, head, page_size=page_size, draft_topk=topk)
    drafter = eagle.a_head(runner, head, page_size=page_size, card=graph_card())
    drafts = eagle.a_proposer(drafter, runner, topk)
    every = counted_graphs(runner, drafter, drafts, eagle) if graphs else ()
    statement = Statement(model, head, layers)
    expected = eagle.alone(model, eagle.some_prompts(3), 7)
    eagle.check_scores(drafts, statement, runner, expected)
    assert min((each.replay.count for each in every), default=4) > 3


@pytest.mark.parametrize(
    ("target", "page_size", "topk"),
    [("llama", 1, 4), ("llama", 16, 1), ("deepseek-v3", 16, 4), ("gemma3", 1, 1)],
)
@pytest.mark.turns(2)
def test_greedy_text_is_that_of_each_prompt_alone(
    tiny, run_on, head_of, target, page_size, topk, monkeypatch, eagle
):
    """Prompts in chunks, shared prefixes, and pools in which requests wait and are retracted."""
    monkeypatch.setattr(scheduler, "GROWTH", 1)
    model, folder = tiny(target)
    prompts, head = eagle.some_prompts(), head_of(target)
    expected = eagle.alone(model, prompts)
    runner = a_target(
        run_on, folder, head, page_size=page_size, draft_topk=topk, max_total_tokens=128,
        window_step_tokens=None,
    )  # fmt: skip
    drafter = eagle.a_head(runner, head, page_size=page_size)
    drafts = eagle.a_proposer(drafter, runner, topk)
    for options in ({}, {"prefill_tokens": 5, "prefix_cache": False}):
        engine = Engine(runner, drafts=drafts, **options)
        assert eagle.texts_of(engine, prompts) == expected
        assert engine.stats.drafts.requests > 10
        assert drafter.steps.allocator.available_size() == drafter.steps.allocator.size


def test_sampled_text_is_the_same(tiny, run_on, head_of, eagle):
    folder, head = tiny("llama")[1], head_of("llama")
    runner = a_target(run_on, folder, head, draft_topk=4)
    drafts = eagle.a_proposer(eagle.a_head(runner, head), runner, 4)

    def texts(**given):
        asked = [
            Prompt(token_ids=ids, max_new_tokens=NUM, sampling=SamplingParams(seed=place))
            for place, ids in enumerate(eagle.some_prompts(4))
        ]
        return [one.token_ids for one in run_prompts(Engine(runner, **given), asked).results]

    assert texts(drafts=drafts) == texts()


def changed(**changes):
    def change(tensors, config):
        config.update(changes)

    return change


def without(name):
    def change(tensors, config):
        del tensors[name]

    return change


def far_token(tensors, config):
    tensors["d2t"][-1] += VOCABULARY


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (changed(hidden_size=64), "hidden_size 64"),
        (changed(vocab_size=98), "vocab_size 98"),
        (changed(speculators_model_type="eagle3"), "the library speculators"),
        (changed(eagle_config={LAYERS: [0]}), "fc.weight is missing, unknown or of another shape"),
        (changed(eagle_config={LAYERS: [0, 3]}), "layers of the target: 0 to 2"),
        (changed(eagle_config={}), "eagle_aux_hidden_state_layer_ids"),
        (without("midlayer.hidden_norm.weight"), "hidden_norm.weight is missing"),
        (without("d2t"), "lm_head.1.weight is missing"),
        (far_token, "d2t leads to tokens"),
    ],
    ids=[
        "width", "vocabulary", "layout", "fewer layers", "layers", "no layers", "tensor",
        "no vocabulary", "token",
    ],
)  # fmt: skip
def test_files_of_something_else(tiny, tmp_path, change, said):
    model, _ = tiny("llama")
    tensors, config = random_head(model.config.hidden_size, layers=(0, 1))
    load_head(write(tmp_path, tensors, config), model)
    assert is_head(tmp_path)
    change(tensors, config)
    with pytest.raises(InvalidInput, match=said):
        load_head(write(tmp_path, tensors, config), model)


def test_the_layers_that_a_head_reads(tiny, tmp_path):
    """SGLang's default, its numbers of outputs, and vLLM's of inputs."""
    tensors, config = random_head(32, layers=(0, 1))
    target = LlamaConfig(num_hidden_layers=32)

    def layers():
        return hidden_layers(write(tmp_path, tensors, config), target)

    assert layers() == (0, 1)
    config["eagle_config"] = {LAYERS: [30, 1, 14]}
    assert layers() == (1, 14, 30)
    del config["eagle_config"]
    assert layers() == (1, 15, 28)
    config[LAYERS] = [2, 16, 29]
    assert layers() == (1, 15, 28)
    assert hidden_layers(recall.EAGLE_PATH, target) == ()


def test_a_head_of_the_target_s_whole_vocabulary(tiny, tmp_path):
    model, _ = tiny("llama")
    tensors, config = random_head(model.config.hidden_size, layers=(0, 1))
    for name in ("d2t", "t2d", "lm_head.weight"):
        del tensors[name]
    head = load_head(write(tmp_path, tensors, config), model)
    assert head.token_ids is None
    assert head.lm_head[1] is model.get_output_embeddings()
    assert head.model.embed_tokens is model.get_input_embeddings()


def test_a_target_without_what_the_head_reads_is_refused(tiny, run_on, head_of, eagle):
    folder, head = tiny("llama")[1], head_of("llama")
    drafter = eagle.a_head(a_target(run_on, folder, head), head)
    for given, said in (({}, "without hidden states"), ({"hidden_states": True}, "width")):
        with pytest.raises(InvalidInput, match=said):
            eagle.a_proposer(drafter, run_on(folder, draft_tokens=8, **given), 1)
    with pytest.raises(InvalidInput, match="hidden_layers"):
        run_on(folder, hidden_states=True, hidden_layers=(0, 3))
    runner = a_target(run_on, folder, head)
    with pytest.raises(InvalidInput, match="at most the vocabulary of 40"):
        ModelProposer(drafter, vocabulary_size=VOCABULARY, steps=3, topk=41, target=runner.steps)


def test_layers_that_return_no_state_for_each_token_are_refused(tmp_path, run_on):
    """Gemma 3n's layers return several states of a token. Its decoder returns one."""
    config = Gemma3nTextConfig(
        vocab_size=VOCABULARY, vocab_size_per_layer_input=VOCABULARY, hidden_size=32,
        hidden_size_per_layer_input=16, intermediate_size=48, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention"] * 2, sliding_window=5,
        activation_sparsity_pattern=[0.95, 0.95, 0.0, 0.0], laurel_rank=16,
        max_position_embeddings=128,
    )  # fmt: skip
    model = Gemma3nForCausalLM(config)
    model.save_pretrained(tmp_path)
    words = r"layer 1 of Gemma3nForCausalLM, which returns \[4, 1, \d+, 32\]"
    with pytest.raises(InvalidInput, match=words):
        run_on(tmp_path, hidden_states=True, hidden_layers=(1, 3))
    run_on(tmp_path, hidden_states=True)


def test_states_of_layers_count_as_memory(tiny, run_on):
    """A budget holds as many tokens less as their states take bytes."""
    folder, budget = tiny("llama")[1], MemoryBudget.parse("100kB")

    def tokens(**given):
        return run_on(folder, max_total_tokens=None, memory=budget, **given).kv_tokens

    model, plain = tiny("llama")[0], tokens()
    width = model.config.hidden_size * model.dtype.itemsize
    each = 100_000 / (plain + 1)
    for layers, states in (((), 1), ((0, 2), 2)):
        held = tokens(hidden_states=True, hidden_layers=layers)
        assert held == pytest.approx(100_000 / (each + states * width), abs=2)


def test_the_command_drafts_by_a_head(tmp_path):
    tensors, config = random_head(128, layers=(0, 1, 2))
    places, vocabulary = torch.arange(OWN_VOCABULARY), 258
    tensors["d2t"], tensors["t2d"] = 5 * places, torch.arange(vocabulary) % 6 == 0
    write(tmp_path, tensors, {**config, "vocab_size": vocabulary})
    text, answer = recall.make_prompt(random.Random(4), 80)
    for more in ([], ["--topk", "4", "--draft-tokens", "8"]):
        given = ["--draft", str(tmp_path), "--steps", "3", "--device", "cpu", *more, text]
        ended = CliRunner().invoke(verbs, ["generate", "--json", *given])
        assert not ended.exit_code, ended.output
        said = json.loads(ended.stdout)
        assert [each["text"] for each in said["results"]] == [answer]
        assert said["drafts"]["draft_tokens"] > 0


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A cache of the hub without a network: makes the folder of an id's files."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))

    def make(name):
        root, commit = tmp_path / f"models--{name.replace('/', '--')}", "0" * 40
        folder = root / "snapshots" / commit
        folder.mkdir(parents=True)
        (root / "refs").mkdir()
        (root / "refs" / "main").write_text(commit)
        return folder

    return make


@pytest.mark.parametrize("pickled", [False, True], ids=["safetensors", "torch"])
def test_a_head_of_the_hub(hub, pickled):
    tensors, config = random_head(128, layers=(0, 1, 2))
    folder = write(hub("some/head"), tensors, config)
    if pickled:
        (folder / "model.safetensors").unlink()
        torch.save(tensors, folder / "pytorch_model.bin")
    assert head_folder("some/head").samefile(folder)


def test_a_model_of_the_hub_is_no_head(hub, tiny):
    """Its weights are not asked for."""
    shutil.copy(tiny("llama")[1] / "config.json", hub("some/model"))
    assert head_folder("some/model") is None
    assert head_folder("some/other") is None


def test_drafts_that_the_hub_cannot_give(hub):
    ended = CliRunner().invoke(verbs, ["generate", "x", "--draft", "nobody/nothing"])
    assert ended.exit_code == 2, ended.output
    assert "--draft: expected a folder" in ended.stderr
    assert "nobody/nothing" in ended.stderr
    assert "Traceback" not in ended.stderr
