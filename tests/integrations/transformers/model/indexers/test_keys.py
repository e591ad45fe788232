"""Models with indexers in the engine: the text of transformers' own attention, in any step."""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from attnmux.configs import request_from_model
from attnmux.core import InvalidInput, Plugins, solve
from attnmux.core.find.cpu import probe_cpu
from attnmux.transformers import (
    Engine,
    KeyPicker,
    MemoryBudget,
    ModelProposer,
    NgramProposer,
    Prompt,
    SequenceState,
    run_prompts,
)
from attnmux.transformers.load.checkpoint import quiet_transformers
from attnmux.transformers.model.sparse import indexers
from attnmux.transformers.model.sparse.indexers import Indexers

TOPK, NEW = 12, 8
BASE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "q_lora_rank": 24,
    "kv_lora_rank": 40,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "index_topk": TOPK,
    "index_head_dim": 16,
    "index_n_heads": 32,  # of few heads, many keys have the same score
}
CONFIGS = {
    "deepseek": lambda **more: transformers.DeepseekV32Config(**{**BASE, **more}),
    "glm": lambda **more: transformers.GlmMoeDsaConfig(
        **{**BASE, "indexer_types": ["full", "shared", "full"], **more}
    ),
}

pytestmark = pytest.mark.skipif(
    not hasattr(transformers, "DeepseekV32Config"), reason="this transformers has no indexers"
)


@pytest.fixture(scope="module")
def sparse(tmp_path_factory):
    """(the model with transformers' own eager attention, its checkpoint's folder), by name."""
    made = {}

    def make(name, **more):
        key = (name, *more.items())
        if key not in made:
            torch.manual_seed(0)
            with quiet_transformers(progress=False):
                config = CONFIGS[name](**more)
                model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
                with torch.no_grad():
                    for parameter in model.parameters():
                        if parameter.dim() > 1:
                            parameter.normal_(0, 0.3)
                folder = tmp_path_factory.mktemp(name)
                model.eval().save_pretrained(folder)
            made[key] = model, folder
        return made[key]

    return make


@pytest.fixture
def said(indexed_texts):
    return indexed_texts(seed=2, picked=TOPK, new=NEW)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.turns(4)
def test_text_is_that_of_each_prompt_alone(sparse, run_on, name, page_size, said):
    model, folder = sparse(name)
    expected = said.all_alone(model)
    runner = run_on(folder, page_size=page_size, max_context_len=80, max_total_tokens=512)
    assert (runner.decision.request.kind, runner.decision.request.index_topk) == ("nsa", TOPK)
    assert said.texts(Engine(runner, prefix_cache=False)) == expected
    for options in ({}, {"prefill_tokens": 7}):
        engine = Engine(runner, **options)
        assert said.texts(engine) == expected
        assert engine.stats.reused_tokens > 0
        engine.clear_cache()


def test_other_keys_say_something_else(sparse, run_on, monkeypatch, said):
    """What is picked matters to the texts above."""
    model, folder = sparse("deepseek")
    runner = run_on(folder, max_context_len=80, max_total_tokens=512)

    def first_keys(picker, layer_id, q, k, weights, batch, *, captured):
        keys = torch.arange(TOPK, dtype=torch.int32).expand_as(batch.topk_indices)
        batch.topk_indices.copy_(torch.where(keys > batch.positions.unsqueeze(1), -1, keys))

    monkeypatch.setattr(KeyPicker, "pick", first_keys)
    ids = said.prompts[3]
    spoilt = runner.extend([SequenceState(token_ids=list(ids))])[0]
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
    assert float((spoilt - expected).abs().max() / expected.std()) > 0.1


@pytest.mark.parametrize("name", CONFIGS)
def test_decode_steps_replayed_from_graphs_say_the_same(sparse, said, name):
    said.check_graphs(*sparse(name))


@pytest.fixture
def kernels(monkeypatch):
    """The kernels that a GPU's runner gets, interpreted; the names of those that were asked for."""
    pytest.importorskip("triton")
    from attnmux.emulators import triton_interpreter  # noqa: PLC0415  # where there is a Triton
    from attnmux.triton.functions.index_scores import IndexScores  # noqa: PLC0415  # as above

    asked = []

    def offered(name, context):
        asked.append(name)
        return IndexScores()

    monkeypatch.setattr(indexers, "shared_kernel", offered)
    with triton_interpreter.interpreted():
        yield asked


@pytest.mark.turns(2, suite="interpreted kernels")
def test_kernels_say_the_same(sparse, run_on, kernels, said):
    model, folder = sparse("deepseek")
    runner = run_on(folder, max_context_len=80, max_total_tokens=512, draft_tokens=3)
    asked = [Prompt(token_ids=ids, max_new_tokens=NEW) for ids in said.prompts[1:4]]
    for drafts in (None, NgramProposer(draft_token_num=3)):
        engine = Engine(runner, drafts=drafts)
        found = [result.token_ids for result in run_prompts(engine, asked).results]
        assert found == [said.alone(model, ids) for ids in said.prompts[1:4]]
    assert kernels == ["index_scores"]


@pytest.mark.turns(2, suite="interpreted kernels")
def test_kernels_replayed_from_graphs_say_the_same(sparse, said, kernels):
    said.check_graphs(*sparse("deepseek"))
    assert kernels == ["index_scores"]


def test_chains_of_drafts_leave_the_text_as_it_is(sparse, run_on, said):
    model, folder = sparse("deepseek")
    runner = run_on(folder, max_context_len=80, max_total_tokens=512, draft_tokens=4)
    drafts = NgramProposer(draft_token_num=4)
    engine = Engine(runner, drafts=drafts)
    assert said.texts(engine) == said.all_alone(model)
    assert engine.stats.drafts.requests > 0


def test_a_draft_model_proposes_chains(sparse, run_on, said):
    """The draft model picks every key of its context, and runs as plain MLA."""
    model, folder = sparse("deepseek")
    options = {"max_context_len": 80, "max_total_tokens": 512, "draft_tokens": 4}
    drafter = run_on(sparse("deepseek", index_topk=80)[1], **options)
    drafts = ModelProposer(drafter, vocabulary_size=97, steps=3)
    engine = Engine(run_on(folder, **options), drafts=drafts)
    assert said.texts(engine) == said.all_alone(model)
    assert engine.stats.drafts.accepted_tokens > 0


def test_a_draft_model_with_indexers_is_refused(sparse, run_on):
    drafter = run_on(sparse("deepseek")[1], max_context_len=80, max_total_tokens=512)
    with pytest.raises(InvalidInput, match="draft: expected a max_context_len of no more tokens"):
        ModelProposer(drafter, vocabulary_size=97)


def test_a_context_of_no_more_keys_has_plain_latent_attention(sparse, run_on, said):
    model, folder = sparse("deepseek")
    runner = run_on(folder, max_context_len=TOPK)
    assert runner.decision.request.kind == "mla"
    assert runner.part(Indexers) is None
    ids = said.prompts[1]
    logits = runner.extend([SequenceState(token_ids=list(ids))])
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
    torch.testing.assert_close(logits[0], expected, rtol=1e-4, atol=1e-4)


def test_eight_bit_caches_have_eight_bit_index_keys(sparse, run_on, said):
    _, folder = sparse("deepseek")
    runner = run_on(folder, max_context_len=80, max_total_tokens=512, kv_dtype="fp8_e4m3")
    assert runner.part(Indexers).picker.pool.dtype == torch.float8_e4m3fn
    assert all(len(text) == NEW for text in said.texts(Engine(runner)))


def test_a_budget_holds_the_index_keys_too(sparse, run_on):
    _, folder = sparse("deepseek")
    nbytes = 10**6
    memory = MemoryBudget(nbytes=nbytes)
    runner = run_on(folder, max_context_len=80, max_total_tokens=None, memory=memory)
    taken = runner.context.token_to_kv_pool.nbytes + runner.part(Indexers).picker.pool.nbytes
    assert 0.98 * nbytes < taken <= nbytes


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"mla": "expanded"}, "mla: expected absorbed"),
        ({"draft_tokens": 4, "draft_topk": 2}, "draft_topk: expected 1"),
    ],
)
def test_what_does_not_go_together_with_indexers(sparse, run_on, changes, said):
    _, folder = sparse("deepseek")
    with pytest.raises(InvalidInput, match=said):
        run_on(folder, "fake", max_context_len=80, max_total_tokens=512, debug=False, **changes)


def test_layers_of_sparse_models_are_not_compiled(sparse, run_on):
    runner = run_on(sparse("deepseek")[1], max_context_len=80, max_total_tokens=512)
    with pytest.raises(InvalidInput, match="compile: expected a model without indexers"):
        runner.compile("eager")


def test_an_indexer_that_ranks_otherwise_is_refused(sparse, run_on, monkeypatch):
    module = type(sparse("deepseek")[0].model.layers[0].self_attn.indexer)
    own = module.forward

    def backwards(self, *args, **kwargs):
        return own(self, *args, **kwargs).flip(-1)

    monkeypatch.setattr(module, "forward", backwards)
    with pytest.raises(InvalidInput, match="indices"):
        run_on(sparse("deepseek")[1], max_context_len=80, max_total_tokens=512)


def test_the_request_of_a_config_says_what_is_picked(sparse):
    request = request_from_model(sparse("deepseek")[1] / "config.json")
    assert (request.kind, request.index_topk) == ("nsa", TOPK)
    offers = [offer for offer in Plugins.load().offers() if offer.plugin == "cpu"]
    decision = solve(request, probe_cpu(), offers)
    assert {choice.backend for choice in decision.phases.values()} == {"torch_native"}
