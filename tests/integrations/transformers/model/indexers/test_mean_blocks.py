"""Models whose indexers pick blocks by the mean of their keys: the text of transformers' own
attention."""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from attnmux.configs import request_from_model
from attnmux.core import InvalidInput
from attnmux.transformers import (
    Engine,
    KeysOfBlocks,
    NgramProposer,
    Prompt,
    SequenceState,
    run_prompts,
)
from attnmux.transformers.load.checkpoint import quiet_transformers
from attnmux.transformers.model.sparse.indexers import Indexers

SIZE, TOPK, NEW, END = 4, 3, 8, 11
BASE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
    },
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "layer_types": ["linear_attention", "indexed_attention"] * 2,
    "hc_count": 2,
    "hc_lowrank": 8,
    "bos_token_id": None,
    "eos_token_id": END,
    "pad_token_id": None,
    "indexer_n_heads": 16,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": SIZE * TOPK,
    "indexer_compress_ratio": SIZE,
}
NGRAMS = {
    "ple_layer_ids": [1, 3],
    "ple_embed_dim": 32,
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 300,
    "split_ngram_parts": 2,
}
ATTENTION = {"layer_types": ["indexed_attention"] * 4}
ROOM = {"max_context_len": 80, "max_total_tokens": 512}

# The layers of earlier ones make their own masks
pytestmark = pytest.mark.transformers("5.23")


@pytest.fixture(scope="module")
def blocks(tmp_path_factory):
    """(the model with transformers' own eager attention, its checkpoint's folder)."""
    made = {}

    def make(**more):
        key = tuple(sorted((name, str(value)) for name, value in more.items()))
        if key not in made:
            config = transformers.Qwen4ExpTextConfig(**{**BASE, **more})
            torch.manual_seed(0)
            with quiet_transformers(progress=False):
                model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.normal_(0, 0.3)
                folder = tmp_path_factory.mktemp("blocks")
                model.eval().save_pretrained(folder)
            made[key] = model, folder
        return made[key]

    return make


@pytest.fixture
def said(indexed_texts):
    return indexed_texts(seed=3, picked=SIZE * TOPK, new=NEW)


@pytest.mark.parametrize(
    ("more", "page_size"),
    [
        ({}, 1),
        ({"num_key_value_heads": 1, "indexer_compress_ratio": 3, "indexer_budget": 9}, 16),
        (NGRAMS, 16),
    ],
    ids=["heads", "odd", "ngrams"],
)
def test_text_is_that_of_each_prompt_alone(blocks, run_hybrid, more, page_size, said):
    model, folder = blocks(**more)
    expected = said.all_alone(model)
    runner = run_hybrid(folder, page_size=page_size, **ROOM)
    request = runner.decision.request
    size = more.get("indexer_compress_ratio", SIZE)
    assert (request.kind, request.index_topk, request.index_block_size) == ("mha", TOPK, size)
    assert said.texts(Engine(runner, prefix_cache=False)) == expected
    for options in ({}, {"prefill_tokens": 7}):
        engine = Engine(runner, **options)
        assert said.texts(engine) == expected
        engine.clear_cache()


def test_prefixes_are_shared(blocks, run_hybrid, said):
    model, folder = blocks(**NGRAMS)
    runner = run_hybrid(folder, page_size=4, kept_states=8, **ROOM)
    engine = Engine(runner)
    for _ in range(2):
        assert said.texts(engine) == said.all_alone(model)
    assert engine.stats.reused_tokens > 0


def test_ngrams_do_not_reach_over_an_end_of_text(blocks, run_hybrid, said):
    model, folder = blocks(**NGRAMS)
    runner = run_hybrid(folder, **ROOM)
    for ids in ([END], [5, END, 7], [5, 6, END, END, 7, 8], [END, 9, 5, END, 60, 61, 62]):
        state = SequenceState(token_ids=list(ids))
        logits = [runner.extend([state], [1]) for _ in ids][-1]
        with torch.no_grad():
            expected = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
        torch.testing.assert_close(logits[0], expected, rtol=1e-4, atol=1e-4)
        runner.release([state])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_ids_are_whole_in_16_bits(blocks, run_hybrid, dtype):
    """Two ids that differ by one, far from 0, have other n-grams."""
    model, folder = blocks(**{**NGRAMS, "vocab_size": 70_000, "hidden_size": 8})
    runner = run_hybrid(folder, dtype=str(dtype).split(".")[1], **ROOM)
    found, expected = [], []
    for first in (69_998, 69_999):
        ids = [first, 300, 301]
        found.append(runner.extend([SequenceState(token_ids=ids)])[0].float())
        with torch.no_grad():
            expected.append(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1])
    wanted, got = (pair[0] - pair[1] for pair in (expected, found))
    assert torch.nn.functional.cosine_similarity(wanted, got, dim=0) > 0.9


def test_other_blocks_say_something_else(blocks, run_hybrid, monkeypatch, said):
    """What is picked matters to the texts above."""
    model, folder = blocks()
    runner = run_hybrid(folder, **ROOM)

    def worst_blocks(ranking, scores, *args):
        return picks(ranking, torch.where(scores.isneginf(), scores, -scores), *args)

    picks = KeysOfBlocks.picks
    monkeypatch.setattr(KeysOfBlocks, "picks", worst_blocks)
    ids = said.prompts[3]
    spoilt = runner.extend([SequenceState(token_ids=list(ids))])[0]
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
    assert float((spoilt - expected).abs().max() / expected.std()) > 0.1


def test_decode_steps_replayed_from_graphs_say_the_same(blocks, said):
    said.check_graphs(*blocks(**ATTENTION))


def test_chains_of_drafts_leave_the_text_as_it_is(blocks, run_hybrid, said):
    model, folder = blocks(**ATTENTION)
    runner = run_hybrid(folder, draft_tokens=4, **ROOM)
    engine = Engine(runner, drafts=NgramProposer(draft_token_num=4))
    assert said.texts(engine) == said.all_alone(model)
    assert engine.stats.drafts.requests > 0


def test_eight_bit_caches_keep_what_keys_are_made_of(blocks, run_hybrid, said):
    runner = run_hybrid(blocks()[1], kv_dtype="fp8_e4m3", **ROOM)
    assert runner.part(Indexers).picker.pool.dtype == torch.float32
    assert all(len(text) == NEW for text in said.texts(Engine(runner)))


def test_a_context_of_no_more_keys_is_dense(blocks, run_hybrid, said):
    model, folder = blocks()
    runner = run_hybrid(folder, max_context_len=SIZE * TOPK)
    assert runner.part(Indexers) is None
    ids = said.prompts[1]
    asked = [Prompt(token_ids=ids[:-1], max_new_tokens=1)]
    found = run_prompts(Engine(runner), asked).results[0].token_ids
    assert found == said.alone(model, ids[:-1])[:1]


def test_an_indexer_that_picks_otherwise_is_refused(blocks, run_hybrid, monkeypatch):
    indexer = type(blocks()[0].model.layers[1].self_attn.indexer)
    own = indexer.forward
    monkeypatch.setattr(indexer, "forward", lambda *args: own(*args).roll(1, -1))
    with pytest.raises(InvalidInput, match="as transformers made them"):
        run_hybrid(blocks()[1], **ROOM)


def test_the_request_of_a_config_says_what_is_picked(blocks):
    request = request_from_model(blocks()[1] / "config.json")
    assert (request.kind, request.index_topk, request.index_block_size) == ("mha", TOPK, SIZE)
    assert request.linear_layers == (("gdn", 2),)
