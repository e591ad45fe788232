"""Logits equal those of transformers' own eager attention, whatever the architecture."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, Llama4TextConfig, Phi3Config

from attnmux.transformers import Engine, Prompt, SequenceState, run_prompts
from attnmux.transformers.load.checkpoint import quiet_transformers
from attnmux.transformers.load.context_limit import with_long_factors

ARCHITECTURES = (
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "gemma2",
    "gemma3",
    "gemma3-nested",
    "gpt-oss",
    "deepseek-v2",
    "deepseek-v3",
    "llama4",
    "gpt2",
)
PROMPT_LENS = (13, 1, 33)
"""Uneven, one of a single token, one that ends just after a page of 16."""
NUM_DECODED = 5


@pytest.fixture
def sequences():
    generator = torch.Generator().manual_seed(1)
    lens = [length + NUM_DECODED for length in PROMPT_LENS]
    return [torch.randint(97, (length,), generator=generator).tolist() for length in lens]


def eager_logits(model, sequences):
    with torch.inference_mode():
        return [model(input_ids=torch.tensor([ids])).logits[0] for ids in sequences]


def assert_same(ours, theirs):
    torch.testing.assert_close(ours, theirs, atol=5e-5, rtol=1e-5)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.turns(3)
def test_every_logit_of_prefill_and_decode(tiny, run_on, sequences, architecture, page_size):
    model, folder = tiny(architecture)
    runner = run_on(folder, page_size=page_size)
    theirs = eager_logits(model, sequences)
    states = [
        SequenceState(token_ids=ids[:length])
        for ids, length in zip(sequences, PROMPT_LENS, strict=True)
    ]
    step = runner.steps.extend(states)
    ours = runner.forward(step, torch.arange(sum(PROMPT_LENS)))
    for mine, other, length in zip(ours.split(PROMPT_LENS), theirs, PROMPT_LENS, strict=True):
        assert_same(mine, other[:length])
    for _ in range(NUM_DECODED):
        for state, ids in zip(states, sequences, strict=True):
            state.token_ids.append(ids[len(state.token_ids)])
        expected = [
            other[len(state.token_ids) - 1] for state, other in zip(states, theirs, strict=True)
        ]
        assert_same(runner.decode(states), torch.stack(expected))
    runner.release(states)
    assert runner.steps.allocator.available_size() == runner.context.token_to_kv_pool.size
    assert runner.context.req_to_token_pool.available_size() == runner.context.max_batch_size


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt-oss", "deepseek-v3", "llama4"])
def test_a_prompt_in_chunks(tiny, run_on, sequences, architecture, page_size):
    """The second extend stands on a prefix; one request only starts in it, one decodes."""
    model, folder = tiny(architecture)
    runner = run_on(folder, page_size=page_size)
    theirs = eager_logits(model, sequences)
    states = [SequenceState(token_ids=list(ids)) for ids in sequences]
    runner.extend(states[:2], [7, len(sequences[1]) - 1])
    counts = [state.num_pending for state in states]
    assert counts[1] == 1
    step = runner.steps.extend(states)
    ours = runner.forward(step, torch.arange(sum(counts))).split(counts)
    for mine, other in zip(ours, theirs, strict=True):
        assert_same(mine, other[-len(mine) :])
    runner.release(states)


def test_a_model_that_scales_by_place_in_the_row_takes_positions(tmp_path, run_on):
    """Llama 4's attention temperature steps at its floor_scale, which two of the prompts cross."""
    config = Llama4TextConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        intermediate_size_mlp=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=2,
        max_position_embeddings=128,
        no_rope_layers=[0, 0],
        floor_scale=16,
        attn_scale=5.0,
        eos_token_id=None,
    )
    assert_texts(AutoModelForCausalLM.from_config, config, tmp_path, run_on, max_context_len=64)


def test_longrope_beyond_its_switch_rotates_by_the_long_factors(tmp_path, run_on):
    """A prompt shorter than the switch agrees with the model in which both factors are long."""
    ropes = {"rope_type": "longrope", "rope_theta": 100.0, "long_factor": [3.0, 5.0, 7.0, 9.0]}
    config = Phi3Config(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        original_max_position_embeddings=16,
        rope_parameters={**ropes, "short_factor": [1.0] * 4},
        pad_token_id=None,
        eos_token_id=None,
        bos_token_id=None,
    )
    long = with_long_factors(config)

    def make(_, **options):
        return AutoModelForCausalLM.from_config(long, **options)

    with pytest.warns(UserWarning, match=r"long factors.*context of 64 tokens: with at most 16"):
        assert_texts(make, config, tmp_path, run_on, max_context_len=64)
    run_on(tmp_path, max_context_len=16)  # without the warning


def assert_texts(make, config, folder, run_on, **options):
    """The engine's texts are those of the model that `make` makes of the config."""
    with quiet_transformers(progress=False):
        model = make(config, attn_implementation="eager").eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0, 0.3)
        model.save_pretrained(folder)
        config.save_pretrained(folder)
    prompts = [list(range(1, 12)), list(range(20, 61)), [5, 7]]
    engine = Engine(run_on(folder, **options), prefix_cache=False, prefill_tokens=9)
    asked = [Prompt(token_ids=ids, max_new_tokens=9) for ids in prompts]
    for ids, result in zip(prompts, run_prompts(engine, asked).results, strict=True):
        row = list(ids)
        with torch.inference_mode():
            for _ in range(9):  # without a cache, which Phi-3's own `generate` drops at the switch
                row.append(int(model(torch.tensor([row]), use_cache=False).logits[0, -1].argmax()))
        assert list(result.token_ids) == row[len(ids) :]


def test_the_reference_behind_the_contract_agrees_too(tiny, run_on, sequences):
    """Not torch_native's own doing: the float64 reference gives the same logits."""
    model, folder = tiny("gpt-oss")
    runner = run_on(folder, "fake", page_size=4)
    states = [SequenceState(token_ids=list(ids)) for ids in sequences]
    ours = runner.extend(states)
    assert_same(ours, torch.stack([logits[-1] for logits in eager_logits(model, sequences)]))


def test_bfloat16_weights_run_in_bfloat16(tiny, run_on, sequences):
    model, folder = tiny("llama")
    runner = run_on(folder, dtype="bf16")
    assert runner.decision.kv_dtype == "bfloat16"
    logits = runner.extend([SequenceState(token_ids=list(sequences[0]))])
    assert logits.dtype == torch.bfloat16
    theirs = eager_logits(model, sequences[:1])[0][-1]
    assert torch.nn.functional.cosine_similarity(logits[0].float(), theirs, dim=0) > 0.99
