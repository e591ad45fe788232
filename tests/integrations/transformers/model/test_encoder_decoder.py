"""Encoder-decoder models: cross-attention over the pool, batched, against transformers' own."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq

from attnmux.core import InvalidInput, Plugins, PoolExhausted, torch_dtype
from attnmux.core.find.cpu import probe_cpu
from attnmux.transformers import (
    Engine,
    Prompt,
    RunnerOptions,
    SequenceState,
    load_runner,
    open_checkpoint,
    record_layers,
    run_prompts,
)
from attnmux.transformers.engine import scheduler
from attnmux.transformers.load.checkpoint import quiet_transformers
from attnmux.transformers.model import encoder_batches
from attnmux.transformers.model.encoder_decoder import record_decoder
from attnmux.transformers.model.packed_decoder import PackedDecoder

TEXT = {"max_position_embeddings": 64}
CONFIGS = {
    "whisper": lambda small: transformers.WhisperConfig(
        **small,
        num_mel_bins=8,
        max_source_positions=21,
        max_target_positions=64,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    ),
    "bart": lambda small: transformers.BartConfig(**small, **TEXT, forced_eos_token_id=None),
    "mbart": lambda small: transformers.MBartConfig(**small, **TEXT, forced_eos_token_id=None),
    "pegasus": lambda small: transformers.PegasusConfig(**small, **TEXT, forced_eos_token_id=None),
    "marian": lambda small: transformers.MarianConfig(**small, **TEXT, forced_eos_token_id=None),
}
T5 = {
    "vocab_size": 97,
    "d_model": 32,
    "d_kv": 12,
    "d_ff": 48,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 11,
    "decoder_start_token_id": 2,
    "pad_token_id": 1,
    "eos_token_id": 2,
}
GEMMA = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "attn_logit_softcapping": 2.0,
}
TOWER = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "patch_size": 8,
}
NLLB_MOE = {
    "num_experts": 4,
    "encoder_sparse_step": 2,
    "decoder_sparse_step": 2,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
}
CONFIGS |= {
    "m2m_100": lambda small: transformers.M2M100Config(**small, **TEXT, encoder_layerdrop=0.0),
    "t5gemma": lambda small: transformers.T5GemmaConfig(
        encoder=GEMMA,
        decoder=GEMMA,
        vocab_size=97,
        pad_token_id=1,
        eos_token_id=2,
        bos_token_id=0,
    ),
    "t5gemma2": lambda small: transformers.T5Gemma2Config(
        encoder={"text_config": GEMMA, "vision_config": {**TOWER, "image_size": 16}},
        decoder=GEMMA,
        pad_token_id=1,
        eos_token_id=2,
        bos_token_id=0,
        image_token_index=90,
    ),
    "nllb_moe": lambda small: transformers.NllbMoeConfig(**small, **TEXT, **NLLB_MOE),
    "t5": lambda small: transformers.T5Config(**T5),
    "mt5": lambda small: transformers.MT5Config(**T5, feed_forward_proj="gated-gelu"),
    "umt5": lambda small: transformers.UMT5Config(**T5),
    "long_t5": lambda small: transformers.LongT5Config(
        **T5, local_radius=4, encoder_attention_type="local"
    ),
}
"""Requests are longer than the distance from which on biases are the same."""
FSMT_LACKS = ("vocab_size", "pad_token_id")
BERT = {
    "vocab_size": 97,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 66,
}
CONFIGS |= {
    "mvp": lambda small: transformers.MvpConfig(**small, **TEXT, forced_eos_token_id=None),
    "led": lambda small: transformers.LEDConfig(
        **small,
        attention_window=[4, 8],
        max_encoder_position_embeddings=64,
        max_decoder_position_embeddings=64,
    ),
    "fsmt": lambda small: transformers.FSMTConfig(
        **{name: value for name, value in small.items() if name not in FSMT_LACKS},
        **TEXT,
        **{"src_vocab_size": 120, "tgt_vocab_size": 97, "forced_eos_token_id": None},
    ),
    "bert2roberta": lambda small: transformers.EncoderDecoderConfig(
        encoder=transformers.BertConfig(**BERT, hidden_size=48).to_dict(),
        decoder=transformers.RobertaConfig(
            **BERT,
            hidden_size=32,
            is_decoder=True,
            add_cross_attention=True,
            pad_token_id=1,
            eos_token_id=2,
        ).to_dict(),
        pad_token_id=1,
        decoder_start_token_id=2,
    ),
    "speecht5": lambda small: transformers.SpeechT5Config(
        vocab_size=97,
        hidden_size=32,
        encoder_layers=2,
        encoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_layers=3,
        decoder_attention_heads=4,
        decoder_ffn_dim=48,
        conv_dim=[16, 16],
        conv_stride=[4, 4],
        conv_kernel=[8, 4],
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        max_text_positions=64,
        mask_time_prob=0.0,
    ),
}
"""FSMT's encoder knows tokens that its decoder does not. The states of BERT are projected."""
SPEECH = ("whisper", "speecht5")
DECODED = 5


@pytest.fixture(scope="module")
def made(tmp_path_factory, small):
    """(the model with transformers' own eager attention, its checkpoint's folder), by name."""
    known = {}

    def make(name):
        if name not in known:
            torch.manual_seed(0)
            kind = AutoModelForSpeechSeq2Seq if name in SPEECH else AutoModelForSeq2SeqLM
            with quiet_transformers(progress=False):
                model = kind.from_config(CONFIGS[name](small), attn_implementation="eager").eval()
                with torch.no_grad():
                    for parameter in model.parameters():
                        if parameter.dim() > 1:
                            # T5 does not scale its logits
                            parameter.normal_(0, 0.2 if "t5" in name else 0.3)
                folder = tmp_path_factory.mktemp(name)
                model.save_pretrained(folder)
                # Some checkpoints leave out the table of positions, which is computed.
                model = kind.from_pretrained(folder, attn_implementation="eager").eval()
            known[name] = model, folder
        return known[name]

    return make


def encoder_inputs(name):
    """Three requests' inputs; text of other lengths each, sound of one."""
    generator = torch.Generator().manual_seed(1)
    if name == "whisper":
        return [{"input_features": torch.randn(1, 8, 42, generator=generator)} for _ in range(3)]
    if name == "speecht5":
        lengths = (300, 40, 500)
        return [{"input_values": torch.randn(1, length, generator=generator)} for length in lengths]
    most = 120 if name == "fsmt" else 97
    return [
        {"input_ids": torch.randint(3, most, (1, length), generator=generator)}
        for length in (19, 1, 32)
    ]


def token_ids():
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(3, 97, (n,), generator=generator).tolist() for n in (18, 6, 29)]


def logits_of(model, inputs, ids):
    with torch.inference_mode():  # with a cache FSMT's decoder is not causal
        return model(**inputs, decoder_input_ids=torch.tensor([ids]), use_cache=False).logits[0]


def assert_same(ours, theirs):
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-5)


def run(run_on, folder, **changes):
    return run_on(folder, **{"max_total_tokens": 512, "max_context_len": 64, **changes})


def states_of(runner, inputs, ids, lens):
    return [
        SequenceState(token_ids=tokens[:length], encoder_states=runner.encode(given))
        for tokens, given, length in zip(ids, inputs, lens, strict=True)
    ]


@pytest.mark.parametrize(
    ("name", "own", "cross", "encoder"),
    [
        *(
            (
                name,
                "model.decoder.layers.1.self_attn",
                "model.decoder.layers.1.encoder_attn",
                "model.encoder.layers.1.self_attn",
            )
            for name in ("bart", "whisper")
        ),
        (
            "t5",
            "decoder.block.1.layer.0.SelfAttention",
            "decoder.block.1.layer.1.EncDecAttention",
            "encoder.block.1.layer.0.SelfAttention",
        ),
    ],
)
def test_the_checkpoint_s_kv_dtype_and_scales_are_used(
    made, tmp_path, name, own, cross, encoder
) -> None:
    folder = shutil.copytree(made(name)[1], tmp_path / name)
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    tensors |= {f"{own}.k_scale": torch.tensor(0.5), f"{own}.v_scale": torch.tensor(0.25)}
    tensors |= {f"{cross}.kv_scale": torch.tensor([2.0]), f"{encoder}.k_scale": torch.tensor(4.0)}
    save_file(tensors, file, metadata={"format": "pt"})
    said = {"quantization": {"kv_cache_quant_algo": "FP8"}}
    (folder / "hf_quant_config.json").write_text(json.dumps(said))
    warned: list[str] = []
    options = RunnerOptions(max_batch_size=2, max_context_len=64, max_total_tokens=128)
    offers = Plugins.load().offers()
    runner = load_runner(open_checkpoint(folder), probe_cpu(), offers, options, warn=warned.append)
    assert runner.decision.kv_dtype == "fp8_e4m3"
    scales = [(layer.k_scale, layer.v_scale) for layer in runner.context.layers]
    assert scales[2:4] == [(0.5, 0.25), (2.0, 2.0)]
    assert scales[:2] == [(None, None)] * 2
    (warning,) = (one for one in warned if "scales of K and V" in one)
    assert encoder in warning


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(
    ("name", "backend"),
    [
        *((name, "torch_native") for name in CONFIGS),
        ("whisper", "fake"),
        ("t5", "fake"),
        ("t5gemma2", "fake"),
    ],
)
@pytest.mark.turns(8)
def test_chunks_and_decode_give_the_models_own_logits(made, run_on, name, page_size, backend):
    """In the second extend one request goes on, one comes with its encoder, one is through."""
    model, folder = made(name)
    runner = run_on(folder, backend, max_total_tokens=512, max_context_len=64, page_size=page_size)
    inputs, ids = encoder_inputs(name), token_ids()
    theirs = [logits_of(model, *pair) for pair in zip(inputs, ids, strict=True)]
    lens = [len(one) - DECODED for one in ids]
    states = states_of(runner, inputs, ids, lens)
    ours = [[], [], []]
    for chosen, counts in (((0, 2), (5, 24)), ((1, 0), (1, 8))):
        step = runner.steps.extend([states[one] for one in chosen], counts)
        parts = runner.forward(step, torch.arange(sum(counts))).split(counts)
        for one, part in zip(chosen, parts, strict=True):
            ours[one].append(part)
    for parts, other, length in zip(ours, theirs, lens, strict=True):
        assert_same(torch.cat(parts), other[:length])
    for _ in range(DECODED):
        for state, tokens in zip(states, ids, strict=True):
            state.token_ids.append(tokens[len(state.token_ids)])
        expected = [
            other[len(state.token_ids) - 1] for state, other in zip(states, theirs, strict=True)
        ]
        assert_same(runner.decode(states), torch.stack(expected))
    runner.release(states)
    assert runner.steps.allocator.available_size() == runner.context.token_to_kv_pool.size
    assert runner.context.req_to_token_pool.available_size() == runner.context.max_batch_size


@pytest.mark.parametrize("kv_dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_8_bit_floats_round_the_encoders_k_and_v_too(made, run_on, kv_dtype, monkeypatch):
    folder, given, ids = made("bart")[1], encoder_inputs("bart"), token_ids()
    logits = []
    for stored in (kv_dtype, "float32"):
        runner = run(run_on, folder, page_size=16, kv_dtype=stored)
        write = runner.context.token_to_kv_pool.set_kv_buffer

        def rounded(layer, loc, k, v, *scales, write=write):
            dtype = torch_dtype(kv_dtype)
            write(layer, loc, k.to(dtype).float(), v.to(dtype).float(), *scales)

        if stored == "float32":
            monkeypatch.setattr(runner.context.token_to_kv_pool, "set_kv_buffer", rounded)
        states = states_of(runner, given, ids, (5, 3, 17))
        steps = [runner.extend(states)]
        for state, tokens in zip(states, ids, strict=True):
            state.token_ids.append(tokens[-1])
        logits.append(torch.cat([*steps, runner.decode(states)]))
    torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize(
    "name",
    [
        *("whisper", "bart", "t5", "mt5", "umt5"),
        *("mvp", "led", "fsmt", "bert2roberta", "speecht5"),
    ],
)
@pytest.mark.turns(3)
def test_greedy_tokens_are_those_of_transformers_generate(made, run_on, name):
    model, folder = made(name)
    runner = run(run_on, folder, page_size=16)
    inputs = encoder_inputs(name)
    states = states_of(runner, inputs, [[2]] * 3, [1] * 3)
    logits = runner.extend(states)
    for _ in range(12):
        for state, token in zip(states, logits.argmax(-1).tolist(), strict=True):
            state.token_ids.append(token)
        logits = runner.decode(states)
    for state, given in zip(states, inputs, strict=True):
        theirs = transformers.GenerationMixin.generate(
            model,
            **given,
            max_new_tokens=12,
            do_sample=False,
            num_beams=1,
            use_cache="t5" not in name,  # it would have as many layers as the encoder
        )[0].tolist()
        # transformers stops after the first end of text, id 2
        assert state.token_ids[: len(theirs)] == theirs


def generated(engine, requests):
    """What requests (token ids, encoder states) get; the last ones come while others run."""
    waiting, finished, order = list(requests), {}, []
    while waiting or engine.has_work:
        for ids, states in waiting[:2]:
            order.append(engine.add(ids, max_new_tokens=18, encoder_states=states))
        del waiting[:2]
        for output in engine.step():
            if output.result is not None:
                finished[output.request_id] = list(output.result.token_ids)
    return [finished[one] for one in order]


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("name", ["whisper", "bart", "t5", "umt5", "t5gemma2", "bert2roberta"])
@pytest.mark.turns(12)
def test_the_engine_gives_each_request_what_it_gets_alone(
    made, run_on, monkeypatch, name, page_size
):
    """The same prompts with other encoder inputs share nothing; the pool holds two or three of six.

    Admitted without regard to their growth, some are retracted and run again.
    """
    monkeypatch.setattr(scheduler, "GROWTH", 0)
    runner = run_on(
        made(name)[1],
        page_size=page_size,
        max_total_tokens=100,
        max_context_len=40,
        max_batch_size=6,
        debug=False,
    )
    prompts = [[2], [2, 5, 7], [2] * 20] * 2
    encoded = [runner.encode(given) for given in encoder_inputs(name) * 2]
    alone = []
    for prompt, states in zip(prompts, encoded, strict=True):
        alone += generated(Engine(runner, prefix_cache=False), [(prompt, states)])
    engine = Engine(runner, prefill_tokens=16)
    assert generated(engine, list(zip(prompts, encoded, strict=True))) == alone
    assert engine.stats.reused_tokens == 0
    assert engine.stats.retractions > 0
    memory = engine.memory
    assert (memory.cached, memory.held) == (0, 0)
    assert memory.free == runner.context.token_to_kv_pool.size


def test_the_engine_counts_the_encoders_tokens(made, run_on):
    runner = run_on(made("bart")[1], max_total_tokens=32, max_context_len=40, page_size=1)
    engine = Engine(runner)
    states = runner.encode(encoder_inputs("bart")[0])
    engine.check([2] * 5, 9, encoder_len=19)
    with pytest.raises(PoolExhausted):
        engine.add([2] * 5, max_new_tokens=10, encoder_states=states)
    with pytest.raises(InvalidInput, match="encoder_states"):
        engine.add([2] * 5, max_new_tokens=2)
    assert not engine.has_work


def test_two_layers_of_the_pool_for_each_of_the_decoders(made, run_on):
    runner = run(run_on, made("whisper")[1])
    layers = runner.context.layers
    assert [layer.layer_id for layer in layers] == list(range(6))
    assert [layer.is_cross_attention for layer in layers] == [False, True] * 3
    assert runner.decision.request.cross_attention
    assert runner.decision.request.origins["cross_attention"] == "model"
    assert runner.steps.max_encoder_len == 21
    assert runner.steps.max_context_len == 64
    assert runner.context.max_context_len == 85


@pytest.mark.parametrize("name", ["t5gemma", "t5gemma2"])
def test_a_call_to_two_layers_needs_their_lse(made, run_on, name):
    runner = run(run_on, made(name)[1])
    layers = runner.context.layers
    assert [layer.is_cross_attention for layer in layers] == [False, True] * 3
    assert [layer.sliding_window_size for layer in layers] == [4, -1, -1, -1, 4, -1]
    assert runner.decision.request.lse == (name == "t5gemma2")


@pytest.mark.parametrize("name", ["t5", "mt5", "umt5"])
def test_self_attention_alone_has_relative_biases(made, run_on, name):
    """In T5 the first layer's table is that of all layers; in UMT5 each has its own."""
    model, folder = made(name)
    runner = run(run_on, folder)
    layers = runner.context.layers
    assert runner.decision.request.relative_bias
    assert [layer.is_cross_attention for layer in layers] == [False, True] * 3
    assert all((layer.relative_bias is None) == layer.is_cross_attention for layer in layers)
    assert {layer.scaling for layer in layers} == {1.0}
    first, second = layers[0].relative_bias, layers[2].relative_bias
    assert torch.equal(first, second) == (name != "umt5")
    block = model.get_decoder().block[0].layer[0].SelfAttention
    far = block.compute_bias(1, 60, past_seen_tokens=59)[0, :, 0].detach()
    reach = layers[0].relative_reach
    assert reach == 11
    torch.testing.assert_close(first, far[:, -reach - 1 :], atol=0, rtol=0)
    expected = first[:, :1].expand(-1, 60 - reach)
    torch.testing.assert_close(far[:, : 60 - reach], expected, atol=0, rtol=0)
    # The encoder may have as many tokens as the decoder, as no table of positions ends
    assert runner.steps.max_encoder_len == 64


def test_the_encoder_runs_once_and_its_keys_are_written_once(made, run_on):
    """A step without new encoders reads what is in the pool: the cross layers' slots stay."""
    runner = run(run_on, made("bart")[1], page_size=16)
    calls = []
    runner.model.model.get_encoder().register_forward_hook(lambda *_: calls.append(1))
    states = states_of(runner, encoder_inputs("bart"), token_ids(), [4, 3, 9])
    runner.extend(states, [2, 3, 9])
    pool, table = runner.context.token_to_kv_pool, runner.context.req_to_token_pool.req_to_token
    slots = torch.cat([table[state.row, : state.encoder_len] for state in states]).long()
    before = [pool.get_key_buffer(layer)[slots].clone() for layer in (1, 3, 5)]
    assert all(bool(keys.any()) for keys in before)
    runner.extend(states[:1])
    for state in states:
        state.token_ids.append(5)
    runner.decode(states)
    for layer, keys in zip((1, 3, 5), before, strict=True):
        torch.testing.assert_close(pool.get_key_buffer(layer)[slots], keys, atol=0, rtol=0)
    assert len(calls) == 3


PADS = {
    *("bart", "mbart", "pegasus", "marian", "m2m_100", "t5gemma", "t5gemma2", "t5", "mt5", "umt5"),
    "bert2roberta",
}
"""Those whose encoders' layers all call transformers' interface."""


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.turns(2)
def test_encoders_in_one_call_give_each_request_its_own_states(made, run_on, name):
    model, folder = made(name)
    runner = run(run_on, folder)
    given = encoder_inputs(name) * 2
    batches = []
    runner.model.model.get_encoder().register_forward_hook(
        lambda _, args, kwargs, out: batches.append(out.last_hidden_state.shape[0]),
        with_kwargs=True,
    )
    with torch.inference_mode():
        expected = [model.get_encoder()(**each).last_hidden_state[0] for each in given]
    if name in SPEECH:
        assert not runner.model._encoder.pads_texts
    else:
        assert runner.model._encoder.pads_texts == (name in PADS)
    del batches[:]
    found = runner.encode_all(given)
    assert sorted(batches) == ([6] if name in PADS or name == "whisper" else [2, 2, 2])
    for ours, theirs in zip(found, expected, strict=True):
        assert_same(ours, theirs)


def test_texts_of_one_call_have_a_limit(made, run_on, monkeypatch):
    runner = run(run_on, made("bart")[1])
    given = encoder_inputs("bart")  # of 19, 1 and 32 tokens
    monkeypatch.setattr(encoder_batches, "MOST_TOKENS", 40)
    calls = []
    runner.model.model.get_encoder().register_forward_hook(
        lambda _, args, kwargs, out: calls.append(tuple(out.last_hidden_state.shape[:2])),
        with_kwargs=True,
    )
    assert runner.model._encoder.pads_texts
    del calls[:]
    found = runner.encode_all(given)
    assert calls == [(2, 19), (1, 32)]
    assert [each.shape[0] for each in found] == [19, 1, 32]


def test_a_released_request_runs_again_without_its_encoder(made, run_on):
    model, folder = made("bart")
    runner = run(run_on, folder, page_size=16)
    inputs, ids = encoder_inputs("bart")[:1], token_ids()[:1]
    (state,) = states_of(runner, inputs, ids, [9])
    first = runner.extend([state])
    runner.release([state])
    assert (state.row, state.num_columns, state.encoder_cached) == (None, 0, False)
    assert_same(runner.extend([state]), first)
    assert_same(first[0], logits_of(model, inputs[0], ids[0][:9])[-1])


def test_a_step_that_does_not_fit_changes_nothing(made, run_on):
    runner = run_on(made("bart")[1], max_total_tokens=48, max_batch_size=2, page_size=1)
    states = states_of(runner, encoder_inputs("bart")[:2], token_ids()[:2], [18, 6])
    runner.extend(states)
    (large,) = states_of(runner, encoder_inputs("bart")[2:], token_ids()[2:], [29])
    free = runner.steps.allocator.available_size()
    assert free == 48 - 19 - 18 - 1 - 6
    with pytest.raises(PoolExhausted):
        runner.extend([large])
    assert (large.row, large.num_columns, large.encoder_cached) == (None, 0, False)
    assert runner.steps.allocator.available_size() == free


def test_encoder_inputs_and_states_that_cannot_be_are_refused(made, tiny, run_on):
    runner = run(run_on, made("bart")[1], max_encoder_len=20)
    ids = torch.randint(3, 97, (1, 21))
    for inputs, words in (
        ({"input_ids": ids}, "at most the context of 20"),
        ({"input_ids": ids[:, :5] + 97}, "token id"),
        ({"input_embeds": torch.zeros(1, 21, 32)}, "inputs_embeds"),
        ({"inputs_embeds": torch.zeros(1, 21, 32)}, "1 to 20"),
        ({"input_ids": ids[:, :5].expand(2, -1)}, "one request"),
        ({"input_values": ids[:, :5]}, "input_ids"),
        ({"input_ids": ids[:, :2], "attention_mask": torch.tensor([[1, 0]])}, "padding"),
        ({}, "nothing"),
        ({"input_ids": [[5, 6]]}, "a list as input_ids"),
        ({"input_ids": ids[:, :5].float()}, "float32"),
        ({"input_ids": ids[:, :5, None]}, r"\[1, 5, 1\]"),
        (ids[:, :5], "a Tensor"),
        ({"inputs_embeds": torch.zeros(1, 5, 31)}, "BartForConditionalGeneration can read"),
    ):
        with pytest.raises(InvalidInput, match=words):
            runner.encode(inputs)
    with pytest.raises(InvalidInput, match="length"):
        run(run_on, made("whisper")[1]).encode({"input_features": torch.zeros(1, 8, 30)})
    for name in ("max_context_len", "max_encoder_len"):
        with pytest.raises(InvalidInput, match="limit, 64"):
            run(run_on, made("bart")[1], **{name: 65})
    given = {"input_ids": ids[:, :5], "attention_mask": torch.ones(1, 5)}
    assert runner.encode(given).shape == (5, 32)
    with pytest.raises(InvalidInput, match="encoder_states"):
        runner.extend([SequenceState(token_ids=[2])])
    with pytest.raises(InvalidInput, match="encoder_states"):
        runner.extend([SequenceState(token_ids=[2], encoder_states=torch.zeros(21, 32))])
    plain = run_on(tiny("llama")[1])
    with pytest.raises(InvalidInput, match="encoder"):
        plain.encode(given)
    with pytest.raises(InvalidInput, match="encoder_states"):
        plain.extend([SequenceState(token_ids=[2], encoder_states=torch.zeros(5, 32))])


def test_states_that_no_step_could_read_are_refused_before_other_requests_run(made, run_on):
    runner = run(run_on, made("bart")[1], max_encoder_len=20)
    engine = Engine(runner)
    states = runner.encode({"input_ids": torch.tensor([[5, 6, 7]])})
    running = engine.add([2], max_new_tokens=3, encoder_states=states)
    for wrong, words in (
        (states[None], r"\[E, 32\] in torch.float32 on cpu.*got \[1, 3, 32\]"),
        (states[0], r"got \[32\]"),
        (states[:, :31], r"got \[3, 31\]"),
        (states.double(), "got .* in torch.float64"),
        (states.tolist(), "got a list"),
        (states[:0], "1 to 20"),
    ):
        with pytest.raises(InvalidInput, match=words):
            engine.add([2], max_new_tokens=3, encoder_states=wrong)
        asked = Prompt(token_ids=[2], max_new_tokens=3, encoder_states=wrong)
        with pytest.raises(InvalidInput, match=words):
            run_prompts(Engine(runner), [asked])
        with pytest.raises(InvalidInput, match=words):
            runner.extend([SequenceState(token_ids=[2], encoder_states=wrong)])
    results = {}
    while engine.has_work:
        results |= {one.request_id: one.result for one in engine.step()}
    assert results[running].finish_reason == "length"


REFUSED = {
    "switch_transformers": (
        lambda small: transformers.SwitchTransformersConfig(
            vocab_size=97, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4
        ),
        "drops tokens beyond the capacity of an expert",
    ),
    "nllb_moe": (
        lambda small: transformers.NllbMoeConfig(
            **small, **TEXT, **NLLB_MOE, moe_eval_capacity_token_fraction=0.5
        ),
        "drops tokens beyond the capacity of an expert",
    ),
    "prophetnet": (
        lambda small: transformers.ProphetNetConfig(
            vocab_size=97,
            hidden_size=32,
            num_encoder_layers=1,
            num_decoder_layers=1,
            num_encoder_attention_heads=4,
            num_decoder_attention_heads=4,
        ),
        "a bias by distance that depends on the query",
    ),
    "mvp": (
        lambda small: transformers.MvpConfig(
            **small, **TEXT, use_prompt=True, prompt_length=3, prompt_mid_dim=8
        ),
        "attn_prompt",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_cannot_be_served_are_refused(tmp_path, run_on, name, small):
    config, words = REFUSED[name]
    with quiet_transformers(progress=False):
        AutoModelForSeq2SeqLM.from_config(config(small)).save_pretrained(tmp_path)
    with pytest.raises(InvalidInput, match=words):
        run(run_on, tmp_path)


def test_places_of_encoder_states_are_found(made):
    """MoonshineStreaming's decoder adds a position to each."""
    model = made("bart")[0]

    def with_places(_, args, kwargs):
        states = kwargs["encoder_hidden_states"]
        places = torch.arange(states.shape[1]).view(1, -1, 1)
        return args, {**kwargs, "encoder_hidden_states": states + places}

    hook = model.get_decoder().register_forward_pre_hook(with_places, with_kwargs=True)
    try:
        with pytest.raises(InvalidInput, match="their places in the row"):
            record_decoder(PackedDecoder(model), max_context_len=64)
    finally:
        hook.remove()


def test_positions_that_are_not_looked_at_are_found(made):
    model = made("bart")[0]
    embed = model.get_decoder().embed_positions
    whole = embed.forward
    embed.forward = lambda *args, position_ids: whole(
        *args, position_ids=torch.arange(position_ids.numel()).view(position_ids.shape)
    )
    try:
        with pytest.raises(InvalidInput, match="position"):
            record_decoder(PackedDecoder(model), max_context_len=64)
    finally:
        del embed.forward
    with pytest.raises(InvalidInput, match="encoder-decoder"):
        record_layers(model, max_context_len=64)
