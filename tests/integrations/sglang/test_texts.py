"""SGLang with attnmux generates the texts that it generates without."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang")

import torch
import transformers

import attnmux.transformers.recall as recall

BASE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "tie_word_embeddings": False,
}
ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]
FAMILIES: dict[str, Callable[[], transformers.PreTrainedConfig]] = {
    "gqa": lambda: transformers.LlamaConfig(**BASE),
    "windows": lambda: transformers.Olmo3Config(
        **BASE, sliding_window=6, layer_types=["sliding_attention"] * 3
    ),
    "mixed windows": lambda: transformers.Gemma3TextConfig(
        **BASE, head_dim=16, sliding_window=6, layer_types=ALTERNATING
    ),
    "soft cap": lambda: transformers.Gemma2Config(
        **{**BASE, "tie_word_embeddings": True},
        head_dim=16,
        sliding_window=6,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=None,  # by a kernel of Triton in SGLang
        hidden_act="gelu_pytorch_tanh",
    ),
    "sinks": lambda: transformers.GptOssConfig(
        **BASE,
        head_dim=16,
        sliding_window=6,
        layer_types=ALTERNATING,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    ),
    "mla": lambda: transformers.DeepseekV2Config(
        **{**BASE, "num_key_value_heads": 4},
        kv_lora_rank=16,
        q_lora_rank=None,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        n_group=1,
        topk_group=1,
        topk_method="greedy",
        first_k_dense_replace=3,
        moe_layer_freq=1,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    ),
}

OWN = {"gqa", "windows", "mixed windows"}
"""Families that SGLang's own backend for this platform, torch_native, serves. It has no logit cap,
no sinks and no latents: there, transformers' eager attention is the reference."""
RECALL = Path(recall.__file__).parent
NUM_TOKENS = [12, 5, 17, 9, 3, 14, 8, 11]


def _prompts(vocabulary: int) -> list[list[int]]:
    """Prompts shorter and longer than a chunk; the last half begins as the first does."""
    rng = random.Random(0)
    lengths = (7, 100, 33, 64)
    first = [[rng.randrange(3, vocabulary) for _ in range(length)] for length in lengths]
    return [*first, *([*prompt, rng.randrange(3, vocabulary)] for prompt in first)]


@pytest.mark.turns(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_random_model_gives_the_same_tokens(
    family: str, run: Callable[..., Any], select: Callable[..., Any], tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    model = save(family, folder)
    asked = _prompts(97), NUM_TOKENS
    (got, again), log = run(folder, "attnmux", [asked, asked])
    # The verb asks what the engine asks
    assert f"attention: {select(folder)[1]}" in log
    if family in OWN:
        (own,), _ = run(folder, "torch_native", [asked])
        expected = [each.token_ids for each in own]
    else:
        expected = _greedy_texts(model, asked)
    assert [each.token_ids for each in got] == expected
    assert [each.token_ids for each in again] == expected
    assert sum(each.cached_tokens for each in again) >= 4 * 60


def test_sinks_that_are_updated_in_place_count(run: Callable[..., Any], tmp_path: Path) -> None:
    model = save("sinks", tmp_path / "model")
    asked = _prompts(97), NUM_TOKENS
    name = "model.layers.{}.self_attn.sinks"
    weights = {name.format(layer): torch.full((4,), 3.0 - layer) for layer in range(3)}
    (before, after), _ = run(tmp_path / "model", "attnmux", [asked, weights, asked])
    assert [each.token_ids for each in before] == _greedy_texts(model, asked)
    with torch.no_grad():
        for key, value in weights.items():
            model.get_parameter(key).copy_(value)
    assert [each.token_ids for each in after] == _greedy_texts(model, asked)
    assert after != before


def _greedy_texts(
    model: transformers.PreTrainedModel, asked: tuple[list[list[int]], list[int]]
) -> list[tuple[int, ...]]:
    return [tuple(greedy(model, prompt, length)) for prompt, length in zip(*asked, strict=True)]


@pytest.mark.turns(2)
@pytest.mark.parametrize(
    ("changes", "count"),
    [({}, 24), ({"page_size": 16}, 12), ({"enable_mixed_chunk": True}, 12)],
    ids=["page 1", "page 16", "mixed chunks"],
)
def test_the_shipped_checkpoint_gives_the_right_answers(
    changes: dict[str, Any], count: int, run: Callable[..., Any]
) -> None:
    rng = random.Random(1)
    asked = [recall.make_prompt(rng, rng.choice((32, 90, 200, 400))) for _ in range(count)]
    prompts = [list(prompt.encode()) for prompt, _ in asked]
    lengths = [len(answer) for _, answer in asked]
    (answers,), _ = run(RECALL, "attnmux", [(prompts, lengths)], **changes)
    assert [bytes(each.token_ids).decode() for each in answers] == [right for _, right in asked]


def save(name: str, folder: Path) -> transformers.PreTrainedModel:
    """A model with weights far from zero, so that attention is far from uniform; also saved."""
    torch.manual_seed(0)
    made = transformers.AutoModelForCausalLM.from_config(
        FAMILIES[name](), attn_implementation="eager"
    )
    with torch.no_grad():
        for parameter_name, parameter in made.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3)
            elif "sinks" in parameter_name:
                parameter.copy_(torch.randn_like(parameter).bfloat16().float())  # SGLang's dtype
    made.save_pretrained(folder)
    return made.eval()


@torch.inference_mode()
def greedy(model: transformers.PreTrainedModel, prompt: list[int], num_tokens: int) -> list[int]:
    """Tokens that transformers' eager attention generates, without a cache."""
    ids = list(prompt)
    for _ in range(num_tokens):
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
        ids.append(int(logits.argmax()))
    return ids[len(prompt) :]
