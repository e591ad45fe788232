"""Rotary embeddings that depend on the longest request are served only where they do not."""

from __future__ import annotations

import pytest
import transformers

from attnmux.core import InvalidInput
from attnmux.transformers.rotary import check_rotary, fixed_rotary_len

SMALL = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1, "pad_token_id": 0}


def dynamic():
    return transformers.LlamaConfig(
        **SMALL,
        max_position_embeddings=64,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0},
    )


def long_rope():
    return transformers.Phi3Config(
        **SMALL,
        max_position_embeddings=256,
        original_max_position_embeddings=32,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10_000.0,
            "short_factor": [1.0] * 4,
            "long_factor": [2.0] * 4,
        },
    )


def by_layer_type():
    return transformers.Gemma3TextConfig(**SMALL, head_dim=8, max_position_embeddings=256)


def by_place_in_the_row():
    return transformers.Llama4TextConfig(**SMALL, floor_scale=16, attn_temperature_tuning=True)


@pytest.mark.parametrize(
    ("config", "limit"), [(dynamic(), 64), (long_rope(), 32), (by_place_in_the_row(), 15)]
)
def test_the_context_ends_where_rescaling_begins(config, limit):
    assert fixed_rotary_len(config) == limit
    check_rotary(config, limit)
    with pytest.raises(InvalidInput, match=f"at most {limit}"):
        check_rotary(config, limit + 1)


@pytest.mark.parametrize(
    "config", [transformers.LlamaConfig(**SMALL), by_layer_type(), transformers.GPT2Config()]
)
def test_other_positions_have_no_such_limit(config):
    assert fixed_rotary_len(config) is None
    check_rotary(config, 10**6)
