"""Attention modules that run more than once in a step: each call is a layer of its own."""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from attnmux.core import InvalidInput
from attnmux.transformers import IMPLEMENTATION, record_layers
from attnmux.transformers.load.checkpoint import quiet_transformers
from attnmux.transformers.model.absorbed import absorbed_layers
from attnmux.transformers.model.layer_call import layer_id_of
from attnmux.transformers.model.probe import Probe
from attnmux.transformers.model.repeated import CALLS, NumberedCalls, has_numbered_calls


def make(**changes):
    config = transformers.DiffLlamaConfig(
        **{
            "vocab_size": 97,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            **changes,
        }
    )
    with quiet_transformers(progress=False):
        return AutoModelForCausalLM.from_config(config, attn_implementation=IMPLEMENTATION).eval()


def test_each_call_is_a_layer():
    model = make()
    assert not has_numbered_calls(model)
    layers = record_layers(model, max_context_len=32)
    assert [layer.layer_id for layer in layers] == [0, 1, 2, 3]
    assert has_numbered_calls(model)
    assert absorbed_layers(model, layers) is None
    again = record_layers(model, max_context_len=32)
    assert [layer.layer_id for layer in again] == [0, 1, 2, 3]


def test_a_call_out_of_order_is_refused():
    first, second = torch.nn.Identity(), torch.nn.Identity()
    calls = NumberedCalls([first, second, first])
    for _ in range(2):
        assert [calls.take(module) for module in (first, second, first)] == [0, 1, 2]
        with pytest.raises(InvalidInput, match="attention call 3"):
            calls.take(second)
        calls.begin()
    with pytest.raises(InvalidInput, match="attention call 0"):
        calls.take(second)


def test_a_step_that_failed_leaves_no_count():
    model = make()
    record_layers(model, max_context_len=32)
    attention = model.model.layers[0].self_attn
    getattr(attention, CALLS).begin()
    assert layer_id_of(attention) == 0
    with torch.inference_mode():
        _, recorder = Probe.of(model).run([5], [0])
    assert [call.layer_id for call in recorder.calls] == [0, 1, 2, 3]
