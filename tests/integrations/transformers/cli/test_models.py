"""`attnmux generate` with models whose attention is not plain."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
import transformers
from click.testing import CliRunner
from transformers import AutoConfig, AutoModelForCausalLM

from attnmux.core.cli.verbs import verbs
from attnmux.transformers import recall
from attnmux.transformers.load.checkpoint import quiet_transformers

TOKENIZER_FILES = shutil.ignore_patterns("*.py", "__*", "config.json", "*.safetensors")


def attnmux(*args):
    return CliRunner().invoke(verbs, ["generate", *map(str, args)])


def save(folder, kind, config):
    shutil.copytree(recall.PATH, folder, ignore=TOKENIZER_FILES, dirs_exist_ok=True)
    torch.manual_seed(0)
    with quiet_transformers(progress=False):
        model = kind.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0, 0.3)
        model.save_pretrained(folder)
    return folder


@pytest.fixture
def vocabulary():
    return AutoConfig.from_pretrained(recall.PATH).vocab_size


@pytest.fixture
def deepseek(tmp_path, vocabulary):
    config = transformers.DeepseekV3Config(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=40,
        q_lora_rank=24,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=12,
        first_k_dense_replace=2,
        max_position_embeddings=64,
    )
    return save(tmp_path / "deepseek", AutoModelForCausalLM, config)


def test_the_latent_or_every_heads_keys_at_choice(deepseek):
    given = ("--model", deepseek, "abc", "--max-new-tokens", 8, "--json")
    answers = [
        attnmux(*given, *more) for more in ((), ("--mla", "absorbed"), ("--mla", "expanded"))
    ]
    ids = []
    for result in answers:
        assert result.exit_code == 0, result.output
        answer = json.loads(result.stdout)
        assert answer["warnings"] == []
        ids.append(answer["results"][0]["token_ids"])
    assert ids[0] == ids[1] == ids[2]


def test_a_model_without_a_latent_is_not_absorbed():
    result = attnmux("abc", "--mla", "absorbed")
    assert result.exit_code == 2
    assert "kv_b_proj" in result.stderr


def test_the_gain_of_a_window_pool_is_printed(tmp_path, vocabulary):
    config = transformers.MistralConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=5,
        max_position_embeddings=64,
    )
    folder = save(tmp_path / "mistral", AutoModelForCausalLM, config)
    args = ["--model", folder, "--dtype", "float32", "--max-new-tokens", 4, "k1, ?k"]
    result = attnmux(*args, "--memory", "2MB", "--json")
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    assert answer["kv_window_tokens"] < answer["kv_one_pool_tokens"] < answer["kv_pool_tokens"]
    gain = answer["kv_pool_tokens"] / answer["kv_one_pool_tokens"]
    words = f"KV memory: {answer['kv_pool_tokens']} tokens, {gain:.2f} times as many as without"
    assert words in result.stderr
    assert "KV memory" not in attnmux(*args).stderr
