"""transformers' own `generate` and `generate_batch`, with its caches, on attnmux's backends."""

from __future__ import annotations

import logging
from copy import deepcopy

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.cache_utils import DynamicCache
from transformers.generation import ContinuousBatchingConfig

from attnmux.core import InvalidInput, NoBackend
from attnmux.transformers import IMPLEMENTATION, allow_generate_batch
from attnmux.transformers.load.checkpoint import quiet_transformers
from attnmux.transformers.model.stage import LEAST_CONTEXT, Room
from attnmux.transformers.model.visible import Lens, MaskWithKeys
from attnmux.transformers.run.implementation import Implementation

ARCHITECTURES = (
    "llama",
    "qwen2",
    "mistral",
    "gemma2",
    "gemma3",
    "gpt-oss",
    "deepseek-v2",
    "deepseek-v3",
    "llama4",
    "gpt2",
)
LENS = (13, 1, 9)
GREEDY = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}


@pytest.fixture
def on_attnmux(tiny):
    """A tiny model, by name, that runs with attn_implementation="attnmux"."""

    def load(name):
        with quiet_transformers(progress=False):
            return AutoModelForCausalLM.from_pretrained(
                tiny(name)[1], attn_implementation=IMPLEMENTATION
            ).eval()

    return load


@pytest.fixture
def prompts():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, 97, (length,), generator=generator).tolist() for length in LENS]


def padded(prompts, side="left"):
    longest = max(map(len, prompts))
    ids, mask = [], []
    for prompt in prompts:
        padding = [0] * (longest - len(prompt))
        real = [1] * len(prompt)
        ids.append(padding + prompt if side == "left" else prompt + padding)
        mask.append(padding + real if side == "left" else real + padding)
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def assert_same(ours, theirs):
    torch.testing.assert_close(ours, theirs, atol=5e-5, rtol=1e-5)


def scores(model, inputs, **options):
    out = model.generate(
        **inputs, **GREEDY, **options, output_logits=True, return_dict_in_generate=True
    )
    return out.sequences, torch.stack(out.logits)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_generate_gives_eager_attentions_logits(tiny, on_attnmux, prompts, architecture):
    inputs = {"input_ids": torch.tensor([prompts[0], prompts[0][::-1]])}
    theirs, their_logits = scores(tiny(architecture)[0], inputs)
    ours, our_logits = scores(on_attnmux(architecture), inputs)
    assert torch.equal(ours, theirs)
    assert_same(our_logits, their_logits)


@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if name != "llama4"])
def test_padding_on_the_left_is_left_out(tiny, on_attnmux, prompts, architecture):
    theirs, their_logits = scores(tiny(architecture)[0], padded(prompts))
    ours, our_logits = scores(on_attnmux(architecture), padded(prompts))
    assert torch.equal(ours, theirs)
    assert_same(our_logits, their_logits)


@pytest.mark.parametrize("architecture", ["llama", "mistral", "gpt-oss"])
def test_logits_of_real_tokens_with_padding_on_the_right(tiny, on_attnmux, prompts, architecture):
    inputs = padded(prompts, side="right")
    real = inputs["attention_mask"].bool()
    with torch.inference_mode():
        theirs = tiny(architecture)[0](**inputs).logits
        ours = on_attnmux(architecture)(**inputs).logits
    assert_same(ours[real], theirs[real])


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "mistral"])
@pytest.mark.parametrize(
    "options",
    [{"num_beams": 3}, {"cache_implementation": "static"}, {"prefill_chunk_size": 4}],
    ids=["beams", "static cache", "chunks"],
)
def test_other_ways_to_generate(tiny, on_attnmux, prompts, architecture, options):
    inputs = {"input_ids": torch.tensor([prompts[0]])}
    theirs = tiny(architecture)[0].generate(**inputs, **GREEDY, **options)
    assert torch.equal(on_attnmux(architecture).generate(**inputs, **GREEDY, **options), theirs)


def test_a_cache_that_was_cropped_is_read_as_it_is_now(tiny, on_attnmux, prompts):
    def second_logits(model):
        cache = DynamicCache(config=model.config)
        ids = torch.tensor([prompts[0]])
        with torch.inference_mode():
            model(input_ids=ids, past_key_values=cache)
            cache.crop(-8)
            return model(input_ids=ids[:, 5:9].flip(1), past_key_values=cache).logits

    assert_same(second_logits(on_attnmux("llama")), second_logits(tiny("llama")[0]))


@pytest.mark.transformers("5.20")
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma2", "gpt-oss"])
def test_generate_batch(tiny, on_attnmux, prompts, architecture):
    model = on_attnmux(architecture)
    allow_generate_batch(model)
    config = GenerationConfig(**GREEDY, eos_token_id=-1)
    # Chunked prompts, and pages that are smaller than a prompt
    batching = ContinuousBatchingConfig(page_size=8, num_blocks=64, max_batch_tokens=16)
    answers = model.generate_batch(
        prompts * 2, generation_config=config, continuous_batching_config=batching
    )
    ours = [each.generated_tokens for each in answers.values()]
    for prompt, tokens in zip(prompts * 2, ours, strict=True):
        alone = tiny(architecture)[0].generate(torch.tensor([prompt]), **GREEDY)
        assert tokens == alone[0, len(prompt) :].tolist()


def test_batching_takes_a_transformers_that_admits_it(on_attnmux, monkeypatch):
    later = Version("99.1")
    monkeypatch.setattr("attnmux.transformers.run.implementation.FIRST_BATCHING", later)
    with pytest.raises(InvalidInput, match=r"99\.1 or later"):
        allow_generate_batch(on_attnmux("llama"))


@pytest.mark.transformers("5.20")
def test_batching_takes_models_that_call_transformers_attention_alone(tiny):
    model = deepcopy(tiny("llama")[0])
    model._supports_attention_backend = False
    with pytest.raises(InvalidInput, match="AttentionInterface"):
        allow_generate_batch(model)


@pytest.mark.parametrize(
    ("inputs", "named"),
    [
        ({"attention_mask": torch.tensor([[1, 0, 1, 1]])}, "padding between tokens"),
        ({"attention_mask": torch.zeros(1, 1, 4, 4)}, "attention_mask"),
    ],
    ids=["a hole", "a mask of its own"],
)
def test_masks_that_are_not_causal_are_refused(on_attnmux, inputs, named):
    with torch.inference_mode(), pytest.raises(InvalidInput, match=named):
        on_attnmux("mistral")(input_ids=torch.tensor([[1, 2, 3, 4]]), **inputs)


def test_chunks_with_padding_are_refused(on_attnmux, prompts):
    with pytest.raises(InvalidInput, match="mask_function"):
        on_attnmux("llama4").generate(**padded(prompts), **GREEDY)


def test_training_is_refused(on_attnmux):
    with pytest.raises(InvalidInput, match="inference"):
        on_attnmux("llama")(input_ids=torch.tensor([[1, 2]]))


def test_the_settings_choose_and_a_refusal_says_why(on_attnmux, monkeypatch):
    monkeypatch.setenv("ATTNMUX_BACKEND", "fa3")
    model = on_attnmux("llama")
    fresh, layer = Implementation(), model.model.layers[0].self_attn
    q, k, v = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3, 8)
    mask = fresh.mask(batch_size=1, q_length=3, kv_length=3, mask_function=causal)
    with torch.inference_mode(), pytest.raises(NoBackend, match="fa3"):
        fresh.attention(layer, q, k, v, mask)


def causal(batch, head, query, key):
    return key <= query


def test_layers_of_a_kind_share_a_backend_and_more_room_replaces_it(caplog):
    fresh = Implementation()
    first, second = torch.nn.Module(), torch.nn.Module()
    first.layer_idx, second.layer_idx = 0, 1
    caplog.set_level(logging.INFO, logger="attnmux.transformers.run.staged")

    def attend(module, tokens):
        q, k = torch.randn(1, 4, tokens, 8), torch.randn(1, 2, tokens, 8)
        mask = fresh.mask(batch_size=1, q_length=tokens, kv_length=tokens, mask_function=causal)
        with torch.inference_mode():
            out, _ = fresh.attention(module, q, k, k, mask)
            expected = torch.nn.functional.scaled_dot_product_attention(
                q, k, k, is_causal=True, enable_gqa=True
            )
        assert_same(out, expected.transpose(1, 2))

    attend(first, 3)
    attend(second, 3)
    assert fresh.staged.decision(first) is fresh.staged.decision(second)
    assert len(caplog.records) == 1
    attend(second, LEAST_CONTEXT + 1)
    attend(first, 3)
    assert fresh.staged.decision(first) is not fresh.staged.decision(second)
    del first, second
    assert not fresh.staged._stages


def test_room_grows_by_doubling():
    room = Room.for_lens(Lens((1, 1, 1), (5, LEAST_CONTEXT + 1, 2)))
    assert room == Room(4, 2 * LEAST_CONTEXT)
    assert room.holds(Lens((1,), (2 * LEAST_CONTEXT,)))
    assert not room.holds(Lens((1,) * 5, (1,) * 5))


@pytest.mark.parametrize("trained", ["q_proj", "k_proj", "v_proj"])
def test_gradients_are_refused_whichever_projection_is_trained(on_attnmux, prompts, trained):
    model = on_attnmux("llama").requires_grad_(False)
    ids = torch.tensor([prompts[0]])
    plain = model(ids).logits
    for name, weights in model.named_parameters():
        weights.requires_grad_(f"layers.0.self_attn.{trained}" in name)
    said = {"q_proj": "query", "k_proj": "key", "v_proj": "value"}[trained]
    with pytest.raises(InvalidInput, match=f"^{said}: .*a tensor that needs gradients"):
        model(ids)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, plain)


class Numbered(torch.nn.Module):
    layer_idx = 0


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("last", [1, 3, 13])
def test_layers_that_run_for_the_last_tokens_alone(side, last, prompts):
    """As those of Gemma 4 with shared K and V, whose model slices queries and mask."""
    ours = Implementation()
    padding = padded(prompts, side)["attention_mask"]
    batch_size, length = padding.shape
    mask = ours.mask(
        batch_size=batch_size,
        q_length=length,
        kv_length=length,
        mask_function=transformers.masking_utils.causal_mask_function,
        attention_mask=padding,
    )
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(batch_size, 2, length, 16, generator=generator) for _ in range(3))
    whole, _ = ours.attention(Numbered(), q, k, v, mask)
    tail, _ = ours.attention(Numbered(), q[:, :, -last:], k, v, mask[:, :, slice(-last, None), :])
    assert_same(tail, whole[:, -last:])


def test_another_part_of_a_mask_is_refused():
    ours = Implementation()
    mask = ours.mask(
        batch_size=1,
        q_length=5,
        kv_length=5,
        mask_function=transformers.masking_utils.causal_mask_function,
    )
    q = torch.zeros(1, 2, 5, 16)
    for part in (mask[:, :, :3], mask[:, :, :3, :], mask[:, :, ::2, :], mask.clone()):
        assert isinstance(part, MaskWithKeys)
        with pytest.raises(InvalidInput, match=r"attention_mask: .*a mask that the model changed"):
            ours.attention(Numbered(), q, q, q, part)


@pytest.mark.parametrize("num_shared", [0, 3])
def test_gemma_4_with_shared_keys_and_values(num_shared, prompts):
    torch.manual_seed(0)
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    config = transformers.Gemma4TextConfig(
        vocab_size=97,
        vocab_size_per_layer_input=97,
        hidden_size=64,
        hidden_size_per_layer_input=8,
        intermediate_size=64,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        global_head_dim=32,
        num_kv_shared_layers=num_shared,
        sliding_window=4,
        layer_types=2 * kinds,
        pad_token_id=0,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    theirs, their_logits = scores(model, padded(prompts))
    model.set_attn_implementation(IMPLEMENTATION)
    ours, our_logits = scores(model, padded(prompts))
    assert torch.equal(ours, theirs)
    assert_same(our_logits, their_logits)
