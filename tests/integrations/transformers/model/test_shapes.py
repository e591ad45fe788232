"""Models whose layers differ in heads or dims: pools by shape, backends by group of layers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from attnmux.core import (
    InvalidInput,
    JoinedKVPool,
    MHATokenToKVPool,
    NoBackend,
    Offer,
    Plugins,
    SWAKVPool,
)
from attnmux.core.composites.layer_groups import LayerGroupsBackend
from attnmux.core.find.cpu import probe_cpu
from attnmux.core.plugin import one_of
from attnmux.testing import CanaryBackend, RecordingGraphs, fake_card, fake_platform, graph_card
from attnmux.transformers import (
    Engine,
    NgramProposer,
    Prompt,
    RunnerOptions,
    SequenceState,
    load_runner,
    open_checkpoint,
    run_prompts,
)
from attnmux.transformers.cli.output import as_dict, closing_line
from attnmux.transformers.load.checkpoint import quiet_transformers

BASE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "sliding_window": 5,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
KINDS = ["sliding_attention", "full_attention"] * 3
MAKERS = {
    "gemma4": lambda: transformers.Gemma4TextConfig(
        **BASE,
        head_dim=16,
        global_head_dim=32,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        num_hidden_layers=6,
        layer_types=KINDS,
        num_kv_shared_layers=2,
        vocab_size_per_layer_input=97,
        hidden_size_per_layer_input=8,
    ),
    "mimo": lambda: transformers.MiMoV2FlashConfig(
        **BASE,
        head_dim=24,
        v_head_dim=16,
        num_hidden_layers=4,
        layer_types=KINDS[:4],
        mlp_layer_types=["dense"] * 4,
    ),
}
SHAPES = {"gemma4": {(2, 16, 16): 3, (1, 32, 32): 3}, "mimo": {(4, 24, 16): 2, (2, 24, 16): 2}}
"""KV heads and dims of K and V, and in how many layers."""
PROMPT_LENS = (13, 1, 33)
NUM_DECODED = 5


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    made = {}

    def make(name):
        if name not in made:
            torch.manual_seed(0)
            with quiet_transformers(progress=False):
                config = MAKERS[name]()
                one = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
                with torch.no_grad():
                    for name_of, parameter in one.named_parameters():
                        if parameter.dim() > 1 or "sinks" in name_of:
                            parameter.normal_(0, 0.3)
                folder = tmp_path_factory.mktemp(name)
                one.save_pretrained(folder)
            made[name] = one, folder
        return made[name]

    return make


def offers_named(*names):
    return [offer for offer in Plugins.load().offers() if offer.card.name in names]


def run(folder, offers=None, platform=None, **changes):
    given = {"max_batch_size": 4, "max_context_len": 64, "max_total_tokens": 256, "debug": True}
    return load_runner(
        open_checkpoint(folder),
        platform or probe_cpu(),
        offers or offers_named("torch_native"),
        RunnerOptions(**{**given, **changes}),
    )


def texts():
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randint(97, (n + NUM_DECODED,), generator=generator).tolist() for n in PROMPT_LENS
    ]


def eager_logits(one, sequences):
    with torch.inference_mode():
        return [one(input_ids=torch.tensor([ids]), use_cache=False).logits[0] for ids in sequences]


def assert_logits(runner, one):
    """Prompts in two chunks, then decode steps of all of them."""
    sequences = texts()
    theirs = eager_logits(one, sequences)
    states = [
        SequenceState(token_ids=ids[:n]) for ids, n in zip(sequences, PROMPT_LENS, strict=True)
    ]
    runner.extend([states[0], states[2]], [7, 20])
    ours = runner.extend(states)
    for step in range(NUM_DECODED + 1):
        wanted = [each[n - 1 + step] for each, n in zip(theirs, PROMPT_LENS, strict=True)]
        torch.testing.assert_close(ours, torch.stack(wanted), atol=5e-4, rtol=1e-4)
        if step < NUM_DECODED:
            for state, ids in zip(states, sequences, strict=True):
                state.token_ids.append(ids[len(state.token_ids)])
            ours = runner.decode(states)
    runner.release(states)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("window_step_tokens", [8, None])
@pytest.mark.turns(2)
def test_logits_are_those_of_eager_attention(model, name, page_size, window_step_tokens):
    one, folder = model(name)
    changes = {"page_size": page_size, "window_step_tokens": window_step_tokens}
    runner = run(folder, max_batch_size=3, **changes)
    assert isinstance(runner.backend, LayerGroupsBackend)
    pool = runner.context.token_to_kv_pool
    expected = SWAKVPool if window_step_tokens and page_size == 1 else JoinedKVPool
    assert type(pool) is expected
    assert all(type(each) is MHATokenToKVPool for each in pool.pools)
    assert {
        (each.num_kv_heads, each.head_dim, each.v_head_dim): len(each.layer_ids)
        for each in pool.pools
    } == SHAPES[name]
    assert_logits(runner, one)


@pytest.mark.parametrize("name", MAKERS)
def test_the_pools_take_what_a_budget_grants(model, name):
    _, folder = model(name)
    runner = run(folder, page_size=4, window_step_tokens=None, max_total_tokens=128)
    pool = runner.context.token_to_kv_pool
    token = sum(heads * (k + v) * 4 * layers for (heads, k, v), layers in SHAPES[name].items())
    assert pool.nbytes == (runner.kv_tokens + 4) * token


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.turns(2)
def test_texts_of_an_engine_with_shared_prefixes(model, name, page_size):
    one, folder = model(name)
    runner = run(folder, page_size=page_size, window_step_tokens=16)
    long, _, longer = texts()
    prompts = [longer[:36], longer[:33], long[:9], longer[:20] + long[:4], long[:1]]
    engine = Engine(runner, prefill_tokens=7)
    asked = [Prompt(token_ids=ids, max_new_tokens=6) for ids in prompts]
    ours = [result.token_ids for result in run_prompts(engine, asked).results]
    for ids, got in zip(prompts, ours, strict=True):
        whole = list(ids)
        for _ in range(6):
            whole.append(int(eager_logits(one, [whole])[0][-1].argmax()))
        assert list(got) == whole[len(ids) :]


@pytest.mark.parametrize("name", MAKERS)
def test_drafts_change_no_text_and_a_canary_finds_nothing(model, name):
    _, folder = model(name)
    prompts = [ids * 3 for ids in ([5, 17, 3, 44], [9, 9, 2])]
    asked = [Prompt(token_ids=ids, max_new_tokens=12) for ids in prompts]
    changes = {"page_size": 4, "window_step_tokens": 16, "debug": False}
    plain = run_prompts(Engine(run(folder, **changes), prefill_tokens=7), asked)
    runner = run(
        folder,
        draft_tokens=4,
        wrap=lambda backend, decision: CanaryBackend(backend, share=1.0),
        **changes,
    )
    engine = Engine(runner, prefill_tokens=7, drafts=NgramProposer(draft_token_num=4))
    drafted = run_prompts(engine, asked)
    assert [one.token_ids for one in drafted.results] == [one.token_ids for one in plain.results]
    assert drafted.stats.drafts.accepted_tokens > 0


@pytest.mark.parametrize("name", MAKERS)
def test_one_graph_holds_all_groups(model, name):
    one, folder = model(name)
    offer = Offer(card=graph_card(), plugin="fake", distribution="attnmux-fake", version="1.0")
    runner = run(folder, [offer], fake_platform(), page_size=4, debug=False)
    runner.capture_graphs(batch_sizes=[1, 2, 4], devices=RecordingGraphs())
    replays = []
    replay = runner.graphs.replay

    def counted(batch, inputs, *, size):
        replays.append(batch.batch_size)
        return replay(batch, inputs, size=size)

    runner.graphs.replay = counted
    assert_logits(runner, one)
    assert replays == [3] * NUM_DECODED


def test_generate_tells_each_group_and_the_bytes_of_all_pools(model):
    _, folder = model("gemma4")
    runner = run(folder, page_size=4, window_step_tokens=None)
    asked = [Prompt(token_ids=[5, 9, 3], max_new_tokens=4)]
    generation = run_prompts(Engine(runner), asked)
    line = closing_line(generation, runner)
    nbytes = sum(pool.nbytes for pool in runner.context.token_to_kv_pool.pools)
    assert f"KV memory for 272 tokens, {nbytes:,} bytes in pools of 2 shapes" in line
    assert line.count("of 3 layers with 4/1 heads of 32 torch_native (cpu)") == 2
    told = as_dict(generation, [[5, 9, 3]], runner, 0.0)["decision"]
    (other,) = told["others"]
    assert (other["layers"], other["head_dim"]) == (3, 32)
    assert other["phases"]["decode"] == {"backend": "torch_native", "plugin": "cpu"}


def limited(name, **limits):
    card = fake_card()
    clauses = tuple(replace(clause, **limits) for clause in card.clauses)
    return Offer(card=replace(card, name=name, clauses=clauses), plugin=name)


def test_each_group_has_a_backend_of_its_own(model):
    one, folder = model("gemma4")
    narrow = limited("narrow", head_dim=one_of(16), page_size=one_of(1, 4))
    wide = limited("wide", head_dim=one_of(32), page_size=one_of(4, 8))
    runner = run(folder, [narrow, wide], fake_platform())
    decision = runner.decision
    assert [each.phases["decode"].backend for each in decision.groups] == ["narrow", "wide"]
    assert decision.page_size == 4
    assert "3 layers with 4/1 heads of 32: wide (wide)" in decision.summary()
    assert_logits(runner, one)


def test_a_group_without_a_backend_is_named(model):
    _, folder = model("gemma4")
    with pytest.raises(NoBackend, match="3 layers with 4/1 heads of 32: no attention backend"):
        run(folder, [limited("narrow", head_dim=one_of(16))], fake_platform())
    narrow = limited("narrow", head_dim=one_of(16), page_size=one_of(1))
    wide = limited("wide", head_dim=one_of(32), page_size=one_of(8))
    with pytest.raises(NoBackend, match="though backends serve each alone"):
        run(folder, [narrow, wide], fake_platform())


def test_a_config_that_says_something_else_is_refused(model, tmp_path):
    _, folder = model("mimo")
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = (tmp_path / "config.json").read_text()
    text = config.replace('"v_head_dim": 16', '"v_head_dim": 16, "swa_v_head_dim": 24')
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(InvalidInput, match="v_head_dim: expected 24"):
        run(tmp_path)
