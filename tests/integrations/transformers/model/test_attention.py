"""The attention function refuses what the contract has no word for, and ignores nothing."""

from __future__ import annotations

import pytest
import torch

from attnmux.core import AttnmuxError, ForwardContext, InvalidInput
from attnmux.transformers import SequenceState
from attnmux.transformers.model.attention import attention_forward, no_mask
from attnmux.transformers.model.layer_call import NOT_ATTENTION, read_call


class Layer(torch.nn.Module):
    layer_idx = 3


def qkv(tokens=5, batch=1):
    return (
        torch.randn(batch, 4, tokens, 8),
        torch.randn(batch, 2, tokens, 8),
        torch.randn(batch, 2, tokens, 8),
    )


def test_a_call_is_read_in_the_contracts_terms():
    q, k, v = qkv()
    sinks = torch.zeros(4)
    call = read_call(
        Layer(), q, k, v, None, scaling=0.5, sliding_window=7, softcap=30.0, s_aux=sinks
    )
    assert call.layer_id == 3
    assert torch.equal(call.q, q[0].transpose(0, 1))
    assert call.k.shape == call.v.shape == (5, 2, 8)
    assert (call.scaling, call.sliding_window_size, call.logit_cap) == (0.5, 6, 30.0)
    assert call.sinks is sinks
    assert read_call(Layer(), q, k, v, None).scaling == 8**-0.5


@pytest.mark.parametrize(
    ("passed", "named"),
    [
        ({"dropout": 0.1}, "dropout"),
        ({"is_causal": False}, "is_causal"),
        ({"sliding_window": 0}, "sliding_window"),
        ({"position_bias": torch.zeros(1, 4, 5, 5)}, "position_bias"),
        ({"output_attentions": True}, "output_attentions"),
        ({"cu_seq_lens_q": torch.tensor([0, 5])}, "cu_seq_lens_q"),
        ({"indices": torch.zeros(5, 2)}, "indices"),
        ({"something_new": 1}, "something_new"),
    ],
)
def test_unsupported_arguments_are_refused_by_name(passed, named):
    with pytest.raises(InvalidInput, match=named):
        read_call(Layer(), *qkv(), None, **passed)


def test_arguments_unrelated_to_attention_are_accepted():
    passed = dict.fromkeys(NOT_ATTENTION, torch.zeros(1))
    unset = {"position_bias": None, "output_attentions": False}
    read_call(Layer(), *qkv(), None, **passed, **unset)


def test_layers_and_shapes_without_a_place_in_the_cache_are_refused():
    with pytest.raises(InvalidInput, match="layer_idx"):
        read_call(torch.nn.Module(), *qkv(), None)
    with pytest.raises(InvalidInput, match="one row"):
        read_call(Layer(), *qkv(batch=2), None)
    q, _, _ = qkv(tokens=1)
    _, k, v = qkv(tokens=5)
    with pytest.raises(InvalidInput, match="one row"):
        read_call(Layer(), q, k, v, None)
    module = Layer()
    module.is_causal = False
    with pytest.raises(InvalidInput, match="is_causal"):
        read_call(module, *qkv(), None)


def test_a_mask_is_refused():
    with pytest.raises(InvalidInput, match="attention_mask"):
        attention_forward(Layer(), *qkv(), torch.zeros(1, 1, 5, 5))


def test_the_mask_function_builds_nothing_and_refuses_padding():
    assert no_mask(batch_size=1, q_length=4, mask_function=None) is None
    with pytest.raises(InvalidInput, match="attention_mask"):
        no_mask(attention_mask=torch.ones(1, 4))
    with pytest.raises(InvalidInput, match="mask_function"):
        no_mask(use_vmap=True)


def test_outside_a_step_the_error_says_what_to_do():
    with pytest.raises(AttnmuxError, match=r"ForwardContext\.enter"):
        attention_forward(Layer(), *qkv(), None)


def test_a_layer_that_changed_since_it_was_recorded_is_refused(tiny, run_on):
    runner = run_on(tiny("llama")[1])
    runner.model.model.layers[1].self_attn.scaling = 0.5
    state = SequenceState(token_ids=[1, 2, 3])
    with pytest.raises(InvalidInput, match="layer 1"):
        runner.extend([state])
    runner.release([state])
    assert runner.steps.allocator.available_size() == runner.context.token_to_kv_pool.size


def test_a_training_model_with_dropout_is_refused(tiny, run_on):
    runner = run_on(tiny("llama")[1])
    for layer in runner.model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    runner.model.train()
    with pytest.raises(InvalidInput, match=r"model\.eval"):
        runner.extend([SequenceState(token_ids=[1, 2])])


def test_the_step_of_the_context_is_the_one_that_runs(tiny, run_on):
    """The same model on two runners: each writes to its own pool."""
    first, second = run_on(tiny("llama")[1]), run_on(tiny("llama")[1])
    step = second.steps.extend([SequenceState(token_ids=[1, 2, 3])])
    second.backend.init_forward_metadata(step.batch)
    with torch.inference_mode(), ForwardContext.enter(second.backend, step.batch):
        first.model(
            input_ids=step.input_ids[None], position_ids=step.batch.positions[None], use_cache=False
        )
    assert not first.context.token_to_kv_pool.get_key_buffer(0).any()
    assert second.context.token_to_kv_pool.get_key_buffer(0)[step.batch.out_cache_loc].any()
