"""Models whose layers see keys made of blocks of tokens, next to a window: the text of
transformers' own attention."""

from __future__ import annotations

import random

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from attnmux.core import InvalidInput
from attnmux.transformers import CompressedKeys, Engine, ModelProposer, NgramProposer, SequenceState
from attnmux.transformers.load.checkpoint import quiet_transformers
from attnmux.transformers.model.sparse import picks as picking
from attnmux.transformers.model.sparse.compressors import Compressors

PICKED, NEW = 12, 8
SPARSE, HEAVY, WINDOW = (
    "compressed_sparse_attention",
    "heavily_compressed_attention",
    "sliding_attention",
)
BASE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "head_dim": 16,
    "partial_rotary_factor": 0.5,
    "q_lora_rank": 16,
    "o_groups": 2,
    "o_lora_rank": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 256,
    "layer_types": [SPARSE, HEAVY, WINDOW, SPARSE],
    "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
    "compress_rates": {SPARSE: 4, HEAVY: 8},
    "sliding_window": 5,
    "hc_mult": 2,
    "index_n_heads": 16,
    "index_head_dim": 16,
    "index_topk": 3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
ROOM = {"max_context_len": 80, "max_total_tokens": 512}

pytestmark = pytest.mark.skipif(
    not hasattr(transformers, "DeepseekV4Config"), reason="this transformers has no such model"
)


@pytest.fixture(scope="module")
def compressed(tmp_path_factory):
    """(the model with transformers' own eager attention, its checkpoint's folder)."""
    made = {}

    def make(**more):
        key = tuple(sorted((name, str(value)) for name, value in more.items()))
        if key not in made:
            config = transformers.DeepseekV4Config(**{**BASE, **more})
            torch.manual_seed(0)
            with quiet_transformers(progress=False):
                model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.normal_(0, 0.3)
                folder = tmp_path_factory.mktemp("compressed")
                model.eval().save_pretrained(folder)
            made[key] = model, folder
        return made[key]

    return make


@pytest.fixture
def said(indexed_texts):
    return indexed_texts(seed=3, picked=PICKED, new=NEW)


@pytest.mark.parametrize(
    ("more", "page_size"),
    [({}, 1), ({"compress_rates": {SPARSE: 3, HEAVY: 16}, "sliding_window": 24}, 16)],
    ids=["rates", "odd"],
)
@pytest.mark.turns(2)
def test_text_is_that_of_each_prompt_alone(compressed, run_hybrid, more, page_size, said):
    model, folder = compressed(**more)
    expected = said.all_alone(model)
    runner = run_hybrid(folder, page_size=page_size, **ROOM)
    assert dict(runner.decision.request.compressed_layers) == {SPARSE: 2, HEAVY: 1}
    assert said.texts(Engine(runner, prefix_cache=False)) == expected
    for options in ({}, {"prefill_tokens": 7}):
        engine = Engine(runner, **options)
        assert said.texts(engine) == expected
        engine.clear_cache()


def test_prefixes_are_shared(compressed, run_hybrid, said):
    model, folder = compressed()
    engine = Engine(run_hybrid(folder, page_size=4, **ROOM))
    for _ in range(2):
        assert said.texts(engine) == said.all_alone(model)
    assert engine.stats.reused_tokens > 0


def test_decode_steps_replayed_from_graphs_say_the_same(compressed, said):
    said.check_graphs(*compressed())


def test_chains_of_drafts_leave_the_text_as_it_is(compressed, run_hybrid, said):
    model, folder = compressed()
    engine = Engine(
        run_hybrid(folder, draft_tokens=4, **ROOM), drafts=NgramProposer(draft_token_num=4)
    )
    assert said.texts(engine) == said.all_alone(model)
    assert engine.stats.drafts.requests > 0


def test_keys_of_128_tokens(compressed, run_hybrid):
    model, folder = compressed(compress_rates={SPARSE: 4, HEAVY: 128}, max_position_embeddings=512)
    rng = random.Random(2)
    prompts = [[rng.randrange(97) for _ in range(size)] for size in (126, 300)]
    runner = run_hybrid(folder, page_size=16, max_context_len=320, max_total_tokens=640)
    states = [SequenceState(token_ids=list(ids)) for ids in prompts]
    runner.extend(states, [40, 130])
    logits = runner.extend(states, [86, 170])
    for place in range(131):
        if place in (0, 1, 2, 3, 130):
            expected = [eager_logits(model, state.token_ids) for state in states]
            torch.testing.assert_close(logits, torch.stack(expected), rtol=1e-3, atol=1e-3)
        if place == 3:
            runner.release(states[1:])
            del states[1:]
        for state in states:
            state.token_ids.append(rng.randrange(97))
        logits = runner.decode(states)


def test_eight_bit_caches_keep_what_keys_are_made_of(compressed, run_hybrid, said):
    runner = run_hybrid(compressed()[1], kv_dtype="fp8_e4m3", **ROOM)
    for keys in runner.part(Compressors).keys.values():
        assert keys.pool.rows.dtype == torch.float32
        assert keys.pool.keys.dtype == torch.float8_e4m3fn
    assert all(len(text) == NEW for text in said.texts(Engine(runner)))


def logits_of(runner, ids):
    return runner.extend([SequenceState(token_ids=list(ids))])[0]


@torch.no_grad()
def eager_logits(model, ids):
    return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]


@pytest.mark.parametrize("spoilt", ["picks", "keys", "sinks"])
def test_all_that_a_layer_sees_matters_to_the_text(
    compressed, run_hybrid, said, monkeypatch, spoilt
):
    model, folder = compressed()
    ids, runner = said.prompts[3], run_hybrid(folder, **ROOM)
    compressors = runner.part(Compressors)
    expected = eager_logits(model, ids)
    torch.testing.assert_close(logits_of(runner, ids), expected, rtol=1e-3, atol=1e-3)
    if spoilt == "sinks":
        compressors.sinks = dict.fromkeys(compressors.sinks)
    elif spoilt == "keys":
        monkeypatch.setattr(CompressedKeys, "attend", lambda *args, **kwargs: None)
    else:
        best = picking.best_keys
        monkeypatch.setattr(picking, "best_keys", lambda scores, *args: best(-scores, *args))
    found = logits_of(runner, ids)
    assert float((found - expected).abs().max() / expected.std()) > 0.1


def test_keys_that_a_model_makes_otherwise_are_refused(compressed, run_hybrid, monkeypatch):
    kinds = {type(layer.self_attn.compressor) for layer in compressed()[0].model.layers}
    for kind in kinds - {type(None)}:
        own = kind.forward
        with monkeypatch.context() as patched:
            patched.setattr(
                kind, "forward", lambda *args, own=own: (own(*args)[0] * 1.1, own(*args)[1])
            )
            with pytest.raises(InvalidInput, match="other keys"):
                run_hybrid(compressed()[1], **ROOM)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"draft_tokens": 4, "draft_topk": 2}, "draft_topk"),
        ({"sparse": "quest", "sparse_budget": 64, "page_size": 16}, "sliding_window"),
        ({"kv_dtype": "fp4_e2m1"}, "keys of blocks"),
    ],
)
def test_what_does_not_go_together_is_refused(compressed, run_hybrid, options, name):
    with pytest.raises(InvalidInput, match=name):
        run_hybrid(compressed()[1], **options, **ROOM)


def test_such_a_model_is_not_compiled(compressed, run_hybrid):
    with pytest.warns(UserWarning, match="keys of blocks"):
        run_hybrid(compressed()[1], compile=True, **ROOM)


def test_such_a_model_drafts_for_no_other(compressed, run_hybrid):
    runner = run_hybrid(compressed()[1], window_step_tokens=None, **ROOM)
    with pytest.raises(InvalidInput, match="keys of blocks"):
        ModelProposer(runner, vocabulary_size=97)


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.turns(2)
def test_a_pool_of_windows_holds_what_keys_are_made_of(compressed, run_hybrid, said, page_size):
    """Rows of tokens that fell out of the windows are gone, their keys stay."""
    model, folder = compressed()
    runner = run_hybrid(folder, page_size=page_size, window_step_tokens=16, **ROOM)
    assert runner.sizes.swa is not None
    for keys in runner.part(Compressors).keys.values():
        assert keys.pool.rows.num_slots == runner.sizes.swa + page_size
        assert keys.pool.keys.num_slots == runner.sizes.full // page_size + 1
    engine = Engine(runner, prefill_tokens=16)
    for _ in range(2):
        assert said.texts(engine) == said.all_alone(model)
    assert engine.stats.reused_tokens > 0
