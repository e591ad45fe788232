"""What is recorded of a model's layers, and which models are refused."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.masking_utils import (
    and_masks,
    blockwise_overlay,
    causal_mask_function,
    chunked_causal_mask_function,
    or_masks,
    sliding_window_causal_mask_function,
)

from attnmux.core import InvalidInput, LayerSpec, Request
from attnmux.transformers import IMPLEMENTATION, RunnerOptions, record_layers, request_of
from attnmux.transformers.load.checkpoint import quiet_transformers
from attnmux.transformers.load.model_request import check_against_config, with_kept_dtype
from attnmux.transformers.model import layers
from attnmux.transformers.model.probe import Probe
from attnmux.transformers.model.reach import Reach, read_reach

SMALL = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
LLAMA_LIKE = {**SMALL, "intermediate_size": 48, "num_key_value_heads": 2}


def make(config):
    with quiet_transformers(progress=False):
        return AutoModelForCausalLM.from_config(config, attn_implementation=IMPLEMENTATION).eval()


def record(config, max_context_len=64):
    return record_layers(make(config), max_context_len=max_context_len)


def recorded(tiny, name, max_context_len=64):
    model, _ = tiny(name)
    with quiet_transformers(progress=False):
        copy = AutoModelForCausalLM.from_config(
            deepcopy(model.config), attn_implementation=IMPLEMENTATION
        ).eval()
    copy.load_state_dict(model.state_dict())
    return copy, record_layers(copy, max_context_len=max_context_len)


def test_heads_dims_and_scaling(tiny):
    _, specs = recorded(tiny, "llama")
    assert [spec.layer_id for spec in specs] == [0, 1, 2]
    for spec in specs:
        assert (spec.tp_q_head_num, spec.tp_k_head_num, spec.tp_v_head_num) == (4, 2, 2)
        assert (spec.qk_head_dim, spec.v_head_dim, spec.scaling) == (8, 8, 8**-0.5)
        assert (spec.sliding_window_size, spec.attention_chunk_size) == (-1, 0)
        assert spec.sinks is None


def test_a_window_of_n_is_w_of_n_minus_1_and_only_where_the_model_has_it(tiny):
    _, specs = recorded(tiny, "gemma2")
    assert [spec.sliding_window_size for spec in specs] == [4, -1, 4]
    assert [spec.logit_cap for spec in specs] == [2.0] * 3


def test_a_window_longer_than_the_context_is_still_recorded(tiny):
    _, specs = recorded(tiny, "mistral", max_context_len=3)
    assert [spec.sliding_window_size for spec in specs] == [4, 4, 4]


def test_sinks_are_the_models_in_float32(tiny):
    model, specs = recorded(tiny, "gpt-oss")
    for spec, layer in zip(specs, model.model.layers, strict=True):
        assert spec.sinks is not None
        assert spec.sinks.dtype == torch.float32
        torch.testing.assert_close(spec.sinks, layer.self_attn.sinks.detach().float())


def test_a_chunk_is_read_off_the_mask(tiny):
    """No attention function is ever told it."""
    _, specs = recorded(tiny, "llama4")
    assert [spec.attention_chunk_size for spec in specs] == [4, 4, 4]


def test_recording_leaves_the_model_as_it_was(tiny):
    model, _ = recorded(tiny, "gemma3-nested")
    assert model.config._attn_implementation == IMPLEMENTATION
    assert model.config.text_config._attn_implementation == IMPLEMENTATION
    names = transformers.AttentionInterface().valid_keys()
    assert not [name for name in names if "probe" in name]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            transformers.XLMConfig(vocab_size=97, emb_dim=32, n_layers=2, n_heads=4),
            "sees later ones too",
        ),
        (
            transformers.RwkvConfig(
                vocab_size=97, hidden_size=16, num_hidden_layers=2, attention_hidden_size=16
            ),
            "recurrent state",
        ),
        (
            transformers.Lfm2Config(
                **LLAMA_LIKE, layer_types=["conv", "full_attention", "full_attention"]
            ),
            "mixes tokens in another way",
        ),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_models_that_cannot_be_served_are_refused(config, words):
    with pytest.raises(InvalidInput, match=words):
        record(config)


def test_encoder_decoder_models_are_refused():
    config = transformers.T5Config(vocab_size=97, d_model=16, d_kv=8, d_ff=16, num_layers=1)
    with pytest.raises(InvalidInput, match="encoder-decoder"):
        layers.check_servable(transformers.T5ForConditionalGeneration, config)


def test_tokens_that_meet_outside_of_attention_are_found():
    """Short convolutions would mix the requests of a row, whatever attention does."""
    with pytest.raises(InvalidInput, match="reach other requests"):
        layers.check_packable(
            Probe.of(make(transformers.Lfm2Config(**LLAMA_LIKE, layer_types=["conv"] * 3)))
        )


@pytest.mark.parametrize("where", ["norm", "layers.1.self_attn.k_proj"])
def test_weights_that_are_not_numbers_are_called_that(where):
    """They look like tokens that reach each other: what comes out is not finite either."""
    model = make(transformers.LlamaConfig(**LLAMA_LIKE))
    with torch.no_grad():
        model.model.get_submodule(where).weight[0] = torch.nan
    with pytest.raises(InvalidInput, match="not numbers"):
        record_layers(model, max_context_len=64)


def test_positions_that_begin_above_0():
    """RoBERTa's first token is at position 2: at 0 it would answer, and answer wrongly."""
    config = transformers.RobertaConfig(
        **SMALL,
        intermediate_size=48,
        is_decoder=True,
        max_position_embeddings=66,
        pad_token_id=1,
    )
    model = make(config)
    record_layers(model, max_context_len=64)
    at = []
    table = model.roberta.embeddings.position_embeddings
    table.register_forward_pre_hook(lambda module, args: at.append(args[0].tolist()))
    with torch.inference_mode():
        Probe.of(model).run([5, 6, 7], [0, 1, 0])
    assert at == [[[2, 3, 2]]]
    with pytest.raises(
        InvalidInput, match="at most 64: the model has a table of 66 positions, which begin at 2"
    ):
        record(config, max_context_len=65)


def test_a_model_that_counts_positions_its_own_way_is_refused():
    model = make(transformers.LlamaConfig(**LLAMA_LIKE))
    own = model.forward

    def count(position_ids=None, **kwargs):
        given = position_ids if position_ids is None else 2 * position_ids
        return own(position_ids=given, **kwargs)

    model.forward = count
    with pytest.raises(InvalidInput, match="another count"):
        record_layers(model, max_context_len=64)


def test_a_model_that_does_not_look_at_the_positions_it_is_given_is_refused():
    model = make(transformers.LlamaConfig(**LLAMA_LIKE))
    rotary = model.model.rotary_emb.forward
    model.model.rotary_emb.forward = lambda x, position_ids: rotary(
        x, torch.arange(x.shape[1])[None]
    )
    with pytest.raises(InvalidInput, match="position"):
        record_layers(model, max_context_len=64)


LENGTH = 40


def reach_of(mask, told=Reach()):  # noqa: B008  # a named tuple is immutable
    return read_reach(mask, told, max_context_len=LENGTH, device=torch.device("cpu"))


def test_masks_are_read():
    no_padding = torch.zeros(1, dtype=torch.long)
    assert reach_of(causal_mask_function) == Reach()
    assert reach_of(chunked_causal_mask_function(8, no_padding)) == Reach(attention_chunk_size=8)
    alone = reach_of(chunked_causal_mask_function(1, no_padding))
    assert alone.sees(torch.tensor(5), torch.arange(9)).sum() == 1
    window = sliding_window_causal_mask_function(6)
    assert reach_of(window) == Reach(sliding_window_size=5)
    assert reach_of(window, Reach(sliding_window_size=5)) == Reach(sliding_window_size=5)
    long = Reach(sliding_window_size=LENGTH)
    assert reach_of(causal_mask_function, long) == long


@pytest.mark.parametrize("mask", [causal_mask_function, sliding_window_causal_mask_function(6)])
def test_a_mask_with_blocks_is_read_where_no_token_is_in_one(mask):
    def with_blocks(first):
        return or_masks(mask, blockwise_overlay(torch.tensor([[first, -1, -1]])))

    assert reach_of(with_blocks(-1)) == reach_of(mask)
    with pytest.raises(InvalidInput, match="a table of the step's tokens"):
        reach_of(with_blocks(0))


@pytest.mark.parametrize("told", [Reach(sliding_window_size=4), Reach(sliding_window_size=6)])
def test_a_mask_that_contradicts_the_window_is_refused(told):
    with pytest.raises(InvalidInput, match="mask_function"):
        reach_of(sliding_window_causal_mask_function(6), told)


def test_other_masks_are_refused():
    def every_second(batch, head, query, key):
        return key % 2 == 0

    with pytest.raises(InvalidInput, match="mask_function"):
        reach_of(and_masks(causal_mask_function, every_second))
    with pytest.raises(InvalidInput, match="mask_function"):
        reach_of(lambda batch, head, query, key: key >= 0)  # sees the future
    blocks = torch.zeros(1, 1, dtype=torch.long)  # of images, as Gemma 4 marks them
    with pytest.raises(InvalidInput, match="table of the step's tokens"):
        reach_of(lambda batch, head, query, key: blocks[batch, query] == blocks[batch, key])


def spec(layer_id, **changes):
    given = {
        "tp_q_head_num": 4,
        "tp_k_head_num": 2,
        "tp_v_head_num": 2,
        "qk_head_dim": 16,
        "v_head_dim": 16,
        "scaling": 0.25,
        **changes,
    }
    return LayerSpec(layer_id=layer_id, **given)


def test_the_request_asks_for_what_any_layer_needs():
    specs = [
        spec(0, sliding_window_size=7, sinks=torch.zeros(4)),
        spec(1, logit_cap=30.0),
        spec(2, sliding_window_size=3),
    ]
    request = request_of(specs, torch.bfloat16)
    assert (request.sliding_window, request.logit_cap, request.sinks) == (7, 30.0, True)
    assert request.v_head_dim is None
    assert request.dtype == "bfloat16"
    assert set(request.origins.values()) <= {"model", "default"}


def test_layers_of_other_shapes_are_groups_of_their_own():
    specs = [spec(0), spec(1, qk_head_dim=32, sliding_window_size=7), spec(2, qk_head_dim=32)]
    request = request_of([*specs, spec(3)], torch.float32)
    assert (request.head_dim, request.sliding_window) == (16, None)
    (group,) = request.other_layers
    assert (group.layers, group.head_dim, group.v_head_dim, group.sliding_window) == (2, 32, 16, 7)


def test_layers_that_keep_the_dtype_are_groups_of_their_own():
    """The request's fields are those of the others, even where the first layer is kept."""
    options = RunnerOptions(max_batch_size=1, max_context_len=8, max_total_tokens=8)
    options = replace(options, kv_dtype="fp8_e5m2", kv_dtype_skip="0,sliding_window")
    specs = [spec(0), spec(1), spec(2, sliding_window_size=7), spec(3)]
    kept = with_kept_dtype(specs, torch.float16, options)
    assert [each.kv_dtype for each in kept] == ["float16", None, "float16", None]
    request = request_of(kept, torch.float16)
    assert (request.sliding_window, request.kv_dtype) == (None, None)
    (group,) = request.other_layers
    assert (group.layers, group.sliding_window, group.kv_dtype) == (2, 7, "float16")
    with pytest.raises(InvalidInput, match="got cross_attention layers"):
        with_kept_dtype([spec(0), spec(1, is_cross_attention=True)], torch.float16, options)


def test_latent_layers_of_different_shapes_are_refused():
    latent = {"kind": "mla", "tp_k_head_num": 1, "tp_v_head_num": 1, "v_head_dim": 8}
    with pytest.raises(InvalidInput, match="layer 1"):
        request_of([spec(0, **latent), spec(1, qk_head_dim=32, **latent)], torch.float32)


@pytest.mark.parametrize(
    ("stated", "field"),
    [
        ({"num_q_heads": 8}, "num_q_heads"),
        ({"num_kv_heads": 4}, "num_kv_heads"),
        ({"head_dim": 8}, "head_dim"),
        ({"v_head_dim": 8}, "v_head_dim"),
        ({"sliding_window": 9}, "sliding_window"),
        ({"attention_chunk": 8}, "attention_chunk"),
        ({"sinks": True}, "sinks"),
        ({"logit_cap": 30.0}, "logit_cap"),
    ],
)
def test_a_model_that_does_not_do_what_its_config_says_is_refused(stated, field):
    request = request_of([spec(0, sliding_window_size=7)], torch.float32)
    agreeing = Request(num_q_heads=4, num_kv_heads=2, head_dim=16, sliding_window=7)
    check_against_config(request, agreeing, max_context_len=64)
    with pytest.raises(InvalidInput, match=field):
        check_against_config(request, agreeing.replace(**stated), max_context_len=64)


def test_a_model_may_repeat_k_and_v_itself():
    """JetMoE does for each expert; a config may state fewer heads, and no others."""
    request = request_of([spec(0, tp_k_head_num=4, tp_v_head_num=4)], torch.float32)
    stated = Request(num_q_heads=4, num_kv_heads=2, head_dim=16)
    check_against_config(request, stated, max_context_len=64)
    with pytest.raises(InvalidInput, match="num_kv_heads"):
        check_against_config(request, stated.replace(num_kv_heads=3), max_context_len=64)


def test_a_window_that_the_context_never_fills_is_no_contradiction():
    request = request_of([spec(0)], torch.float32)
    stated = Request(num_q_heads=4, num_kv_heads=2, head_dim=16, sliding_window=4095)
    check_against_config(request, stated, max_context_len=64)


@pytest.mark.parametrize("name", ["GPT2", "OPT", "BioGpt", "OpenAIGPT", "CTRL"])
def test_a_context_beyond_a_table_of_positions_is_refused(name):
    """Learned or not, and whatever the model calls it."""
    sizes = {
        "GPT2": {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 32},
        "OpenAIGPT": {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 32},
        "CTRL": {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 32, "dff": 32},
        "OPT": {"hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 32},
        "BioGpt": {"hidden_size": 32, "intermediate_size": 32},
    }[name]
    if "n_positions" not in sizes:
        sizes |= {"max_position_embeddings": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
    config = getattr(transformers, f"{name}Config")(vocab_size=97, pad_token_id=1, **sizes)
    with pytest.raises(InvalidInput, match=r"context: expected at most 32: .*table of 3[24] pos"):
        record(config, max_context_len=33)
    assert record(config, max_context_len=32)
