"""Models whose indexers pick blocks in the engine: the text of transformers' own attention."""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from attnmux.configs import request_from_model
from attnmux.core import (
    InvalidInput,
)
from attnmux.emulators import triton_interpreter
from attnmux.parts import picked_blocks
from attnmux.transformers import (
    BlockPicker,
    Engine,
    MemoryBudget,
    ModelProposer,
    NgramProposer,
    Prompt,
    SequenceState,
    run_prompts,
)
from attnmux.transformers.load.checkpoint import quiet_transformers
from attnmux.transformers.model.sparse.indexers import Indexers

SIZE, TOPK, NEW = 4, 3, 8
BASE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 16,
    "dense_intermediate_size": 48,
    "shared_intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rotary_dim": 8,
    "max_position_embeddings": 128,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "layer_types": ["minimax_m3_sparse", "full_attention", "minimax_m3_sparse"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_block_size": SIZE,
    "index_topk_blocks": TOPK,
}
ROOM = {"max_context_len": 80, "max_total_tokens": 512}

pytestmark = pytest.mark.skipif(
    not hasattr(transformers, "MiniMaxM3VLTextConfig"), reason="this transformers has no such model"
)


def saved(folder, config, auto=AutoModelForCausalLM):
    torch.manual_seed(0)
    with quiet_transformers(progress=False):
        model = auto.from_config(config, attn_implementation="eager")
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0, 0.3)
        model.eval().save_pretrained(folder)
    return model, folder


@pytest.fixture(scope="module")
def blocks(tmp_path_factory):
    """(the model with transformers' own eager attention, its checkpoint's folder)."""
    made = {}

    def make(**more):
        key = tuple(sorted((name, str(value)) for name, value in more.items()))
        if key not in made:
            config = transformers.MiniMaxM3VLTextConfig(**{**BASE, **more})
            made[key] = saved(tmp_path_factory.mktemp("blocks"), config)
        return made[key]

    return make


@pytest.fixture
def said(indexed_texts):
    return indexed_texts(seed=3, picked=SIZE * TOPK, new=NEW)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"index_n_heads": 4, "index_local_blocks": 2},  # more heads of blocks than of K
        {"num_key_value_heads": 1, "index_n_heads": 1, "layer_types": ["minimax_m3_sparse"] * 3},
    ],
    ids=["heads", "more", "all"],
)
@pytest.mark.turns(4)
def test_text_is_that_of_each_prompt_alone(blocks, run_on, more, page_size, said):
    model, folder = blocks(**more)
    expected = said.all_alone(model)
    runner = run_on(folder, page_size=page_size, **ROOM)
    request = runner.decision.request
    assert (request.kind, request.index_topk, request.index_block_size) == ("mha", TOPK, SIZE)
    assert said.texts(Engine(runner, prefix_cache=False)) == expected
    for options in ({}, {"prefill_tokens": 7}):
        engine = Engine(runner, **options)
        assert said.texts(engine) == expected
        assert engine.stats.reused_tokens > 0
        engine.clear_cache()


def test_other_blocks_say_something_else(blocks, run_on, monkeypatch, said):
    """What is picked matters to the texts above."""
    model, folder = blocks()
    runner = run_on(folder, **ROOM)

    def first_blocks(picker, layer_id, q, k, batch, *, captured):
        block = torch.arange(TOPK, dtype=torch.int32).expand_as(batch.topk_indices)
        own = (batch.positions // SIZE).view(-1, 1, 1)
        batch.topk_indices.copy_(torch.where(block > own, -1, block))

    monkeypatch.setattr(BlockPicker, "pick", first_blocks)
    ids = said.prompts[3]
    spoilt = runner.extend([SequenceState(token_ids=list(ids))])[0]
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
    assert float((spoilt - expected).abs().max() / expected.std()) > 0.1


def test_decode_steps_replayed_from_graphs_say_the_same(blocks, said):
    said.check_graphs(*blocks())


@pytest.fixture
def kernels(monkeypatch):
    """The kernel that a GPU's runner gets, interpreted; the names of those that were asked for."""
    pytest.importorskip("triton")
    from attnmux.triton.functions.picked_blocks import BlockAttention  # noqa: PLC0415  # with a Triton

    asked = []

    def offered(name, context):
        asked.append(name)
        return BlockAttention(context, compute_units=64)

    monkeypatch.setattr(picked_blocks, "shared_kernel", offered)
    with triton_interpreter.interpreted():
        yield asked


@pytest.mark.turns(2, suite="interpreted kernels")
def test_the_kernel_says_the_same(blocks, run_on, kernels, said):
    model, folder = blocks()
    runner = run_on(folder, draft_tokens=3, **ROOM)
    asked = [Prompt(token_ids=ids, max_new_tokens=NEW) for ids in said.prompts[1:4]]
    for drafts in (None, NgramProposer(draft_token_num=3)):
        engine = Engine(runner, drafts=drafts)
        found = [result.token_ids for result in run_prompts(engine, asked).results]
        assert found == [said.alone(model, ids) for ids in said.prompts[1:4]]
    assert kernels == ["picked_blocks"]


@pytest.mark.turns(2, suite="interpreted kernels")
def test_the_kernel_replayed_from_graphs_says_the_same(blocks, said, kernels):
    said.check_graphs(*blocks())
    assert kernels == ["picked_blocks"]


def test_chains_of_drafts_leave_the_text_as_it_is(blocks, run_on, said):
    model, folder = blocks()
    engine = Engine(run_on(folder, draft_tokens=4, **ROOM), drafts=NgramProposer(draft_token_num=4))
    assert said.texts(engine) == said.all_alone(model)
    assert engine.stats.drafts.requests > 0


def test_a_draft_model_with_indexers_is_refused(blocks, run_on):
    drafter = run_on(blocks()[1], **ROOM)
    with pytest.raises(InvalidInput, match="draft: expected a max_context_len of no more tokens"):
        ModelProposer(drafter, vocabulary_size=97)


def test_a_context_of_no_more_keys_is_dense(blocks, run_on, said):
    model, folder = blocks()
    runner = run_on(folder, max_context_len=SIZE * TOPK)
    assert runner.decision.request.index_topk is None
    assert runner.part(Indexers) is None
    ids = said.prompts[1]
    logits = runner.extend([SequenceState(token_ids=list(ids))])
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
    torch.testing.assert_close(logits[0], expected, rtol=1e-4, atol=1e-4)


def test_a_budget_holds_the_index_keys_too(blocks, run_on):
    nbytes = 10**6
    room = {"max_context_len": 80, "max_total_tokens": None}
    runner = run_on(blocks()[1], memory=MemoryBudget(nbytes=nbytes), **room)
    taken = runner.context.token_to_kv_pool.nbytes + runner.part(Indexers).picker.pool.nbytes
    assert 0.98 * nbytes < taken <= nbytes


def test_eight_bit_caches_run(blocks, run_on, said):
    runner = run_on(blocks()[1], kv_dtype="fp8_e4m3", **ROOM)
    assert runner.part(Indexers).picker.pool.dtype == torch.float8_e4m3fn
    assert all(len(text) == NEW for text in said.texts(Engine(runner)))


def test_trees_of_drafts_are_refused(blocks, run_on):
    with pytest.raises(InvalidInput, match="trees of drafts"):
        run_on(blocks()[1], "fake", debug=False, draft_tokens=4, draft_topk=2, **ROOM)


def test_heads_that_do_not_fit_are_refused(blocks, run_on):
    folder = blocks(num_attention_heads=6, num_key_value_heads=3, index_n_heads=2)[1]
    with pytest.raises(InvalidInput, match="indexer: expected some for each KV head"):
        run_on(folder, **ROOM)


def test_an_indexer_that_picks_otherwise_is_refused(blocks, run_on, monkeypatch):
    module = type(blocks()[0].model.layers[0].self_attn.indexer)
    own = module.forward

    def without_local(self, *args, **kwargs):
        return own(self, *args, **kwargs).roll(1, 2)

    monkeypatch.setattr(module, "forward", without_local)
    with pytest.raises(InvalidInput, match="block_indices"):
        run_on(blocks()[1], **ROOM)


def test_text_of_the_model_with_a_vision_tower(tmp_path, run_on, said):
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
    }
    config = transformers.MiniMaxM3VLConfig(
        text_config=transformers.MiniMaxM3VLTextConfig(**BASE).to_dict(),
        vision_config=vision,
        projector_hidden_size=16,
        image_token_index=95,
        video_token_index=96,
    )
    model, folder = saved(tmp_path / "whole", config, AutoModelForImageTextToText)
    runner = run_on(folder, **ROOM)
    engine = Engine(runner)
    asked = [[token % 90 for token in ids] for ids in said.prompts]
    found = run_prompts(engine, [Prompt(token_ids=ids, max_new_tokens=NEW) for ids in asked])
    assert [each.token_ids for each in found.results] == [said.alone(model, ids) for ids in asked]


def test_the_request_of_a_config_says_what_is_picked(blocks):
    request = request_from_model(blocks()[1] / "config.json")
    assert (request.kind, request.index_topk, request.index_block_size) == ("mha", TOPK, SIZE)
