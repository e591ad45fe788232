"""flashinfer's gated delta rule and sgl_kernel's convolutions, emulated."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from attnmux.core import BackendFailed, InvalidInput
from attnmux.core.plugin import (
    LinearAttentionBackend,
    LinearCall,
    PlainConvolutions,
)
from attnmux.emulators.candidates import CONVOLUTIONS, EMULATED_LINEAR, GATED
from attnmux.emulators.nvidia import causal_conv1d
from attnmux.emulators.nvidia.flashinfer import gdn as emulator
from attnmux.nvidia.linear import flashinfer_gdn as adapter
from attnmux.nvidia.linear.causal_convolutions import CausalConvolutions
from attnmux.nvidia.linear.flashinfer_gdn import (
    FlashInferGDNBackend,
    GDNKernels,
    convolutions,
    make,
)
from attnmux.nvidia.linear.gdn_inputs import STEEP, decode_gates, draft_gates, normed
from attnmux.nvidia.linear.packed_requests import PackedRequests
from attnmux.parts import LinearStatePool
from attnmux.testing import AttentionBackendTests, decode, extend, run_case, verify
from attnmux.testing.adapters.tests import recorded
from attnmux.testing.cases.linear import SHAPES, LinearCase
from attnmux.testing.run.linear_execution import call_layer
from attnmux.testing.setup.linear import LinearSetup, make_linear_setup, prepare_linear

CANDIDATE = EMULATED_LINEAR["flashinfer_gdn"].make()
ALONE = EMULATED_LINEAR["flashinfer_gdn-alone"].make()


class TestFlashInferGDNEmulated(AttentionBackendTests):
    backend = CANDIDATE
    sampled = 4


class TestWithoutSglKernel(AttentionBackendTests):
    backend = ALONE
    executions = ("eager",)

    def wants(self, case) -> bool:
        return any(word in case.name for word in ("padding", "bias", "first", "mixed"))


def case_of(*steps, **settings) -> LinearCase:
    dims = {"head_k_dim": 128, "head_v_dim": 128}
    return LinearCase(
        name="adapter", kind="gdn", steps=steps, **{**SHAPES["gdn"], **dims, **settings}
    )


def setup_of(*steps, **settings) -> LinearSetup:
    return make_linear_setup(case_of(*steps, **settings), CANDIDATE.platform, "cpu")


def backend_of(setup: LinearSetup, kernels=GATED) -> FlashInferGDNBackend:
    return FlashInferGDNBackend(setup.context, {}, kernels)


def gates(g: torch.Tensor, beta: torch.Tensor) -> LinearCall:
    """A call of one head whose gates these are."""
    setup = setup_of(decode(3), num_k_heads=1, num_v_heads=1)
    layer = setup.states.layers[0]
    x = torch.zeros(len(g), 1, 128)
    return LinearCall(x, x, x, g.unsqueeze(1), beta.unsqueeze(1), layer, x)


@pytest.mark.parametrize("which", [decode_gates, draft_gates])
def test_gates_are_those_of_the_call(which) -> None:
    """The library computes them again from what its own models give it."""
    g = -torch.cat([torch.zeros(1), torch.logspace(-9, 2.4, 400)])
    beta = torch.linspace(0, 1, len(g))
    a, b = which(gates(g, beta))
    steep = torch.tensor([STEEP])
    flat = torch.zeros(1)
    decay, found = emulator._gates(steep if which is decode_gates else flat, a, flat, b)
    torch.testing.assert_close(decay.squeeze(1), g.exp(), atol=4e-7, rtol=0)
    torch.testing.assert_close(found.squeeze(1), beta, atol=2e-7, rtol=0)


def test_drafts_have_gates_that_the_kernel_bears() -> None:
    """It multiplies an infinite exponential by 0."""
    a, _ = draft_gates(gates(torch.tensor([0.0, -1e-30, -200.0, -1e30]), torch.ones(4)))
    assert a.abs().max() <= 80


def test_lengths_are_taken_in_float32() -> None:
    setup = setup_of(decode(3))
    layer = setup.states.layers[0]
    x = torch.randn(5, 2, 300).bfloat16()[..., :128] * 1e-3
    exact = x.double() / (x.double().square().sum(-1, keepdim=True) + 1e-6).sqrt()
    found = normed(x, layer)
    assert found.is_contiguous()
    torch.testing.assert_close(found, exact.bfloat16(), atol=0, rtol=2**-7)
    assert torch.equal(normed(x, replace(layer, qk_l2norm=False)), x)


def test_kernels_get_the_requests_that_have_tokens() -> None:
    kernels, calls = recorded(GATED.recurrence)
    convs, convolved = recorded(CONVOLUTIONS)
    setup = setup_of(extend((0, 3), (7, 0), (9, 2), trailing=2))
    made = CausalConvolutions(setup.states, convs)
    backend = backend_of(setup, GDNKernels(recurrence=kernels, convolutions=lambda _: made))
    step = prepare_linear(setup, setup.case.steps[0], host_lens=True)
    backend.init_forward_metadata(step.batch)
    call_layer(backend, step.inputs[0], step.batch)
    [call], [conv] = calls, convolved
    assert call.name == "chunk_gated_delta_rule"
    assert call.args[0].shape[0] == 5
    assert call.args[6].shape[0] == 2
    assert call.args[8].tolist() == conv.args[4].tolist() == [0, 3, 5]
    assert conv.args[6].tolist() == [False, True]


def test_a_step_without_new_tokens_calls_nothing() -> None:
    kernels, calls = recorded(GATED.recurrence)
    setup = setup_of(extend((7, 0), (0, 0)))
    backend = backend_of(setup, replace(GATED, recurrence=kernels))
    step = prepare_linear(setup, setup.case.steps[0], host_lens=True)
    backend.init_forward_metadata(step.batch)
    call_layer(backend, step.inputs[0], step.batch)
    assert not calls
    assert isinstance(backend._step, PackedRequests)
    states = setup.states.state(1)[step.batch.req_pool_indices]
    assert states[0].any()
    assert not states[1].any()


@pytest.mark.parametrize("taps", [1, 2, 3, 4, 5, 8])
def test_convolutions_of_any_taps(taps) -> None:
    """`causal_conv1d_fwd` launches nothing for other taps than 2 to 4, and says nothing."""
    steps = (extend((0, 9), (4, 1)), decode(6, 1), verify(3, 7, 0))
    outcome = run_case(CANDIDATE, case_of(*steps, conv_size=taps, conv_bias=True))
    assert outcome.status == "passed", outcome.message


def test_results_go_to_any_rows() -> None:
    """`out` may be a part of wider rows, and gates a part of one projection."""
    steps = {"forward_extend": extend((0, 5), (3, 2)), "forward_decode": decode(4, 9)}
    for step in (*steps.values(), verify(2, 5, 8)):
        setup = setup_of(step)
        backend = backend_of(setup)
        made = prepare_linear(setup, step, host_lens=True)
        given, before = made.inputs[0], setup.states.state(1).clone()
        backend.init_forward_metadata(made.batch)
        qkv = given.q, given.k, given.v
        expected = backend.forward(*qkv, given.layer, made.batch, g=given.g, beta=given.beta)
        setup.states.state(1).copy_(before)
        out = torch.full((*expected.shape[:1], 6, 128), 7.0).bfloat16()[:, :4]
        assert given.beta is not None
        g, beta = (torch.cat([part, part + 1], 1)[:, :4] for part in (given.g, given.beta))
        backend.forward(*qkv, given.layer, made.batch, g=g, beta=beta, out=out)
        assert torch.equal(out, expected)


@pytest.mark.parametrize(
    ("step", "dtype"),
    [
        (decode(4), "float16"),
        (verify(2, 4), "float16"),
        (decode(4), "float32"),
        (extend((0, 3)), "float32"),
    ],
)
def test_dtypes_that_are_refused(step, dtype) -> None:
    setup = setup_of(step, dtype=dtype)
    made = prepare_linear(setup, step, host_lens=True)
    backend, given = backend_of(setup), made.inputs[0]
    backend.init_forward_metadata(made.batch)
    qkv = given.q, given.k, given.v
    with pytest.raises(InvalidInput, match=r"q: expected torch\.bfloat16"):
        backend.forward(*qkv, given.layer, made.batch, g=given.g, beta=given.beta)


@pytest.mark.parametrize(("k_dim", "v_dim"), [(64, 128), (128, 64), (256, 256)])
def test_heads_that_are_refused(k_dim, v_dim) -> None:
    setup = setup_of(decode(3), head_k_dim=k_dim, head_v_dim=v_dim)
    with pytest.raises(InvalidInput, match=rf"linear layer 1: .* got heads of {k_dim} and {v_dim}"):
        backend_of(setup)


def test_the_trial_runs_each_phase() -> None:
    kernels, calls = recorded(GATED.recurrence)
    setup = setup_of(extend((0, 3)), decode(4), verify(2, 4))
    library = replace(make, providers={"ours": lambda: replace(GATED, recurrence=kernels)})
    assert isinstance(library(setup.context, {}), LinearAttentionBackend)
    assert {call.name for call in calls} == {
        "chunk_gated_delta_rule",
        "gated_delta_rule_decode",
        "gated_delta_rule_mtp",
    }
    rows = [buffer[1:] for buffer in setup.states.buffers]
    assert not any(each.any() for each in rows)


@pytest.fixture
def modules(monkeypatch) -> dict[str, object]:
    """What `import_module` finds by name; sgl_kernel is not installed."""
    found: dict[str, object] = {"sgl_kernel": None}
    for name, module in found.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(adapter, "shared_kernel", lambda name, context: found.get(name))
    return found


def test_a_plugin_s_convolutions_come_first(modules, monkeypatch) -> None:
    context = setup_of(decode(4)).context
    modules["short_convolutions"] = offered = PlainConvolutions(LinearStatePool.of(context))
    monkeypatch.setitem(sys.modules, "sgl_kernel", causal_conv1d)
    assert convolutions(context) is offered


def test_convolutions_of_sgl_kernel(modules, monkeypatch) -> None:
    context = setup_of(decode(4), extend((0, 3)), verify(2, 4)).context
    monkeypatch.setitem(sys.modules, "sgl_kernel", causal_conv1d)
    made = convolutions(context)
    assert isinstance(made, CausalConvolutions)
    assert made.states is context.linear_states


def test_without_either_plain_operations_convolve(modules) -> None:
    assert type(convolutions(setup_of(decode(4)).context)) is PlainConvolutions


def test_a_damaged_sgl_kernel_is_a_warning(modules, monkeypatch) -> None:
    def failing(*_: object) -> None:
        raise RuntimeError("no kernel image is available for this device")

    broken = SimpleNamespace(causal_conv1d_fwd=failing, causal_conv1d_update=failing)
    monkeypatch.setitem(sys.modules, "sgl_kernel", broken)
    with pytest.warns(UserWarning, match="plain operations: .*no kernel image"):
        made = convolutions(setup_of(decode(4)).context)
    assert type(made) is PlainConvolutions


def test_a_library_that_does_not_run_is_a_reason() -> None:
    def failing(*_: object, **__: object) -> None:
        raise RuntimeError("sm_90a is not enabled, delta rule kernel is not built")

    broken = replace(GATED.recurrence, gated_delta_rule_decode=failing)
    library = replace(make, providers={"broken": lambda: replace(GATED, recurrence=broken)})
    with pytest.raises(BackendFailed, match="sm_90a is not enabled"):
        library(setup_of(decode(4)).context, {})
