"""What depends on the longest request of a step is served only where it does not."""

from __future__ import annotations

import pytest
import transformers

from attnmux.core import InvalidInput
from attnmux.transformers.load.context_limit import (
    check_context,
    longest_len,
    longrope_switch,
    with_long_factors,
)

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


def by_number_of_keys():
    return transformers.DogeConfig(**SMALL, keep_window_size=48)


@pytest.mark.parametrize(
    ("config", "limit"),
    [(dynamic(), 64), (by_number_of_keys(), 48)],
)
def test_the_context_ends_where_rescaling_or_hiding_begins(config, limit):
    assert longest_len(config) == limit
    check_context(config, limit)
    with pytest.raises(InvalidInput, match=f"at most {limit}"):
        check_context(config, limit + 1)


@pytest.mark.parametrize(
    "config",
    [transformers.LlamaConfig(**SMALL), by_layer_type(), transformers.GPT2Config(), long_rope()],
)
def test_other_positions_have_no_such_limit(config):
    assert longest_len(config) is None
    check_context(config, 10**6)


def test_long_factors_for_rows_of_any_length():
    config = long_rope()
    assert longrope_switch(config) == 32
    longer = with_long_factors(config)
    assert longrope_switch(longer) is None
    assert longer.rope_parameters["short_factor"] == [2.0] * 4
    assert config.rope_parameters["short_factor"] == [1.0] * 4
