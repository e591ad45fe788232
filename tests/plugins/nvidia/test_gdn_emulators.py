"""What the emulators of flashinfer's gated delta rule and of sgl_kernel's convolutions refuse."""

from __future__ import annotations

import pytest
import torch

from attnmux.emulators.nvidia import causal_conv1d as conv
from attnmux.emulators.nvidia.flashinfer import gdn


def prompt(**changes) -> dict[str, torch.Tensor]:
    q, k, v = (torch.randn(5, heads, 128).bfloat16() for heads in (2, 2, 4))
    given = {
        **{"q": q, "k": k, "v": v},
        **{"g": torch.rand(5, 4), "beta": torch.rand(5, 4)},
        "initial_state": torch.zeros(2, 4, 128, 128),
        "cu_seqlens": torch.tensor([0, 3, 5]),
    }
    return {**given, **changes}


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"cu_seqlens": None}, AssertionError, "varlen"),
        ({"cu_seqlens": torch.tensor([0, 5, 5])}, NotImplementedError, "without tokens"),
        ({"cu_seqlens": torch.tensor([0, 3, 6])}, RuntimeError, "memory access"),
        ({"q": torch.randn(5, 2, 128)}, RuntimeError, "dtype"),
        ({"q": torch.randn(5, 2, 256).bfloat16()[..., ::2]}, RuntimeError, "contiguous"),
        ({"k": torch.randn(5, 1, 128).bfloat16()}, RuntimeError, "heads of k"),
        ({"g": torch.rand(5, 4).bfloat16()}, RuntimeError, "alpha"),
        ({"beta": torch.rand(5, 2)}, RuntimeError, "beta"),
        ({"initial_state": torch.zeros(2, 4, 128, 128).bfloat16()}, RuntimeError, "state"),
        ({"output": torch.empty(5, 4, 128)}, RuntimeError, "output"),
        ({"state_checkpoints": torch.zeros(1)}, NotImplementedError, "checkpoints"),
    ],
)
def test_prompts_that_are_refused(changes, error, match) -> None:
    with pytest.raises(error, match=match):
        gdn.chunk_gated_delta_rule(**prompt(**changes))


def test_prompts_are_not_normalised() -> None:
    """The kernel for SM90 does not look at the argument."""
    given = prompt()
    plain = gdn.chunk_gated_delta_rule(**given)
    assert torch.equal(gdn.chunk_gated_delta_rule(**given, use_qk_l2norm_in_kernel=True), plain)


def test_a_decay_of_nothing_is_the_least() -> None:
    given = prompt(g=torch.zeros(5, 4), initial_state=torch.full((2, 4, 128, 128), 1e10))
    out, after = gdn.chunk_gated_delta_rule(**given, output_final_state=True)
    assert out.isfinite().all()
    assert after.isfinite().all()


def token(**changes) -> dict[str, torch.Tensor]:
    q, k, v = (torch.randn(3, 1, heads, 128).bfloat16() for heads in (2, 2, 4))
    gates = {"A_log": torch.zeros(4), "a": torch.randn(3, 1, 4), "dt_bias": torch.zeros(4)}
    given = {"q": q, "k": k, "v": v, **gates, "b": torch.randn(3, 1, 4)}
    return {**given, "state": torch.zeros(3, 4, 128, 128), **changes}


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"q": torch.randn(3, 2, 2, 128).bfloat16()}, AssertionError, "T=1"),
        ({"q": torch.randn(3, 1, 2, 128)}, AssertionError, "float16/bfloat16"),
        ({"state": torch.zeros(3, 4, 128, 128).bfloat16()}, AssertionError, "float32"),
        ({"state": torch.zeros(2, 4, 128, 128)}, AssertionError, "state shape"),
        ({"A_log": torch.zeros(4).bfloat16()}, AssertionError, "A_log"),
        ({"a": torch.randn(3, 1, 4).bfloat16()}, RuntimeError, "compiled for float32"),
        ({"b": torch.randn(3, 1, 8)[..., ::2]}, RuntimeError, "strides"),
        ({"v": torch.randn(3, 1, 5, 128).bfloat16()[:, :, :4]}, RuntimeError, "strides"),
    ],
)
def test_tokens_that_are_refused(changes, error, match) -> None:
    with pytest.raises(error, match=match):
        gdn.gated_delta_rule_decode(**token(**changes))


def drafts(**changes) -> dict[str, torch.Tensor]:
    given = token()
    given["initial_state"] = given.pop("state")
    given |= {
        "initial_state_indices": torch.arange(3, dtype=torch.int32),
        "intermediate_states_buffer": torch.zeros(3, 1, 4, 128, 128),
        "disable_state_update": True,
    }
    return {**given, **changes}


def test_drafts_leave_the_states_and_write_those_after() -> None:
    given = drafts(initial_state=torch.randn(3, 4, 128, 128))
    before = given["initial_state"].clone()
    gdn.gated_delta_rule_mtp(**given)
    assert torch.equal(given["initial_state"], before)
    state = before.transpose(-1, -2).contiguous()
    one = {name: given[name] for name in ("q", "k", "v", "A_log", "a", "dt_bias", "b")}
    gdn.gated_delta_rule_decode(**one, state=state)
    after = given["intermediate_states_buffer"][:, 0]
    torch.testing.assert_close(after, state.transpose(-1, -2))


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"disable_state_update": None}, NotImplementedError, "in place"),
        ({"intermediate_states_buffer": torch.zeros(3, 2, 4, 128, 128)}, RuntimeError, "elsewhere"),
        ({"initial_state_indices": torch.arange(3)}, RuntimeError, "int32"),
        ({"output": torch.zeros(3, 1, 4, 128)}, RuntimeError, "bf16"),
    ],
)
def test_drafts_that_are_refused(changes, error, match) -> None:
    with pytest.raises(error, match=match):
        gdn.gated_delta_rule_mtp(**drafts(**changes))


def test_drafts_of_large_gates_are_spoiled() -> None:
    out, _ = gdn.gated_delta_rule_mtp(**drafts(a=torch.full((3, 1, 4), 89.0)))
    assert out.isnan().all()


def packed(**changes) -> dict[str, torch.Tensor]:
    given = {
        **{"x": torch.randn(6, 5), "weight": torch.randn(6, 4), "bias_": None},
        "conv_states": torch.randn(2, 6, 3),
        "query_start_loc": torch.tensor([0, 3, 5], dtype=torch.int32),
        "cache_indices": None,
        "has_initial_state": torch.tensor([True, False]),
        **{"silu_activation": False, "pad_slot_id": -1},
    }
    return {**given, **changes}


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"x": torch.randn(5, 6).t()}, RuntimeError),
        ({"x": torch.randn(6, 5).bfloat16()}, RuntimeError),
        ({"conv_states": torch.randn(2, 3, 6).transpose(1, 2)}, RuntimeError),
        ({"conv_states": torch.randn(2, 6, 3).bfloat16()}, RuntimeError),
        ({"query_start_loc": torch.tensor([0, 3, 5])}, RuntimeError),
        ({"query_start_loc": torch.tensor([0, 3, 6], dtype=torch.int32)}, RuntimeError),
        ({"bias_": torch.randn(6).bfloat16()}, RuntimeError),
        ({"cache_indices": torch.arange(2, dtype=torch.int32)}, NotImplementedError),
        ({"has_initial_state": None}, NotImplementedError),
    ],
)
def test_packed_requests_that_are_refused(changes, error) -> None:
    with pytest.raises(error):
        conv.causal_conv1d_fwd(**packed(**changes))


def test_other_taps_launch_nothing() -> None:
    given = packed(weight=torch.randn(6, 5), conv_states=torch.randn(2, 6, 4))
    x, states = given["x"].clone(), given["conv_states"].clone()
    conv.causal_conv1d_fwd(**given)
    assert torch.equal(given["x"], x)
    assert torch.equal(given["conv_states"], states)


def test_states_of_a_request_without_tokens_are_garbage() -> None:
    given = packed(query_start_loc=torch.tensor([0, 5, 5], dtype=torch.int32))
    conv.causal_conv1d_fwd(**given)
    assert given["conv_states"][1].isnan().all()


def test_one_token_after_another_is_the_same() -> None:
    given = packed(query_start_loc=torch.tensor([0, 5], dtype=torch.int32))
    given |= {"conv_states": torch.randn(1, 6, 3), "has_initial_state": torch.tensor([True])}
    x, state = given["x"].clone(), given["conv_states"].clone()
    conv.causal_conv1d_fwd(**given)
    weight = given["weight"]
    for token in range(5):
        column = x[:, token].reshape(1, 6, 1).clone()
        conv.causal_conv1d_update(column, state, weight, None, False, None, None, -1)
        torch.testing.assert_close(column.view(-1), given["x"][:, token])
    assert torch.equal(state, given["conv_states"])


@pytest.mark.parametrize(
    "changes",
    [
        {"weight": torch.randn(6, 5)},
        {"conv_state": torch.randn(3, 6, 3)},
        {"x": torch.randn(2, 5, 1)},
    ],
)
def test_single_tokens_that_are_refused(changes) -> None:
    given = {"x": torch.randn(2, 6, 1), "conv_state": torch.randn(2, 6, 3)}
    given |= {"weight": torch.randn(6, 4), **changes}
    with pytest.raises(RuntimeError):
        conv.causal_conv1d_update(
            **given,
            bias_=None,
            silu_activation=False,
            cache_seqlens=None,
            conv_state_indices=None,
            pad_slot_id=-1,
        )
