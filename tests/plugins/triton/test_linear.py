"""The kernels of linear layers, interpreted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attnmux.core import InvalidInput, Platform
from attnmux.core.plugin import ConvCall, LinearAttentionBackend
from attnmux.cpu.torch_linear import TorchLinearBackend
from attnmux.testing import AttentionBackendTests, Candidate, extend
from attnmux.testing.cases.linear import linear_cases
from attnmux.testing.setup.linear import make_linear_setup, prepare_linear
from attnmux.triton.plugin import TRITON_LINEAR

pytest.importorskip("triton")

import triton
import triton.language as tl

from attnmux.triton.kernels.linear.chunks import inverted
from attnmux.triton.linear.backend import TritonLinearBackend
from attnmux.triton.linear.convolutions import make_convolutions
from attnmux.triton.linear.device import LinearDevice
from attnmux.triton.linear.step import CHUNK, LinearStep

CANDIDATE = Candidate(
    card=replace(TRITON_LINEAR, requires=()),
    platform=Platform.parse("nvidia:sm90,cuda=13.0"),
    device="cpu",
)
FEW = ("decode-padding", "decode-first-token", "extend-prefix", "mixed", "extend-float32")
DRAFTS = ("verify-padding", "verify-first-tokens")
ENOUGH = {
    "kda": (*FEW[:3], *DRAFTS, "extend-chunk-edges", "extend-strong-decay"),
    "mamba2": (*FEW, *DRAFTS, "extend-chunk-edges", "extend-8-heads-over-2", "extend-strong-decay"),
    "lightning": (*FEW, *DRAFTS[:1], "extend-chunk-edges"),
}
"""Kinds of which a few cases run: gdn runs in all, and these share its kernels."""
SLOW = {
    *("extend-long", "extend-dims-128", "extend-dims-128-64", "extend-dims-64-128"),
    *("extend-float16", "extend-one-head", "extend-host-lens"),
    *("verify-dims-128", "verify-dims-128-64", "verify-float16", "verify-one-head"),
}


class TestTritonLinear(AttentionBackendTests):
    backend = CANDIDATE
    executions = ("eager",)

    def wants(self, case) -> bool:
        name = case.name.removeprefix(f"{case.kind}-")
        return name in ENOUGH[case.kind] if case.kind in ENOUGH else name not in SLOW


class TestTritonLinearInGraphs(AttentionBackendTests):
    backend = CANDIDATE
    executions = ("graph",)

    def wants(self, case) -> bool:
        return "changing-batch" in case.name or "padding" in case.name


def test_chunks_of_a_step() -> None:
    case = next(case for case in linear_cases() if case.name == "gdn-extend")
    setup = make_linear_setup(case, CANDIDATE.platform, "cpu")
    lengths = extend((0, 0), (7, 150), (0, 64), (3, 1), trailing=2)
    for host_lens in (True, False):
        step = LinearStep.of(prepare_linear(setup, lengths, host_lens=host_lens).batch)
        assert step.starts.tolist() == [0, 0, 150, 214, 215]
        assert step.chunk_indptr.tolist() == [0, 0, 3, 4, 5]
        assert step.chunk_first.tolist() == [0, 64, 128, 150, 214]
        assert step.chunk_count.tolist() == [64, 64, 22, 64, 1]
        assert (step.num_tokens, step.longest) == (215, 150)
        assert step.request_of.tolist() == [1] * 150 + [2] * 64 + [3] + [-1] * 2
        assert int(step.chunk_count.max()) == CHUNK


def test_steps_without_lengths_are_refused() -> None:
    case = next(case for case in linear_cases() if case.name == "gdn-extend")
    setup = make_linear_setup(case, CANDIDATE.platform, "cpu")
    batch = prepare_linear(setup, extend((0, 5)), host_lens=False).batch
    backend = TritonLinearBackend(setup.context)
    with pytest.raises(InvalidInput, match="extend_seq_lens"):
        backend.init_forward_metadata(replace(batch, extend_prefix_lens=None))


def test_scattered_gates_are_read_too() -> None:
    """g and beta may be parts of wider rows, as after one projection."""
    case = next(case for case in linear_cases() if case.name == "gdn-extend")
    setup = make_linear_setup(case, CANDIDATE.platform, "cpu")
    step = prepare_linear(setup, extend((0, 20), (5, 3)), host_lens=True)
    given = step.inputs[0]
    assert given.beta is not None
    backend = TritonLinearBackend(setup.context)
    backend.init_forward_metadata(step.batch)
    before = [buffer.clone() for buffer in setup.states.buffers]
    results = []
    for wide in (False, True):
        for buffer, held in zip(setup.states.buffers, before, strict=True):
            buffer.copy_(held)
        g, beta = given.g, given.beta
        if wide:
            g, beta = (torch.cat([part, part + 1], dim=1)[:, : part.shape[1]] for part in (g, beta))
            assert not g.is_contiguous()
        qkv = given.q, given.k, given.v
        results.append(backend.forward(*qkv, given.layer, step.batch, g=g, beta=beta))
    assert torch.equal(*results)


def test_backends_of_other_plugins_get_the_convolutions() -> None:
    """They are tried on states of their own."""
    case = next(case for case in linear_cases() if case.name == "gdn-extend-then-verify")
    setup = make_linear_setup(case, CANDIDATE.platform, "cpu")
    setup.states.conv(1).fill_(3)
    made = make_convolutions(setup.context)
    assert made.states is setup.states
    assert (setup.states.conv(1) == 3).all()
    step = prepare_linear(setup, case.steps[0], host_lens=True)
    given, backend = step.inputs[0], TritonLinearBackend(setup.context)
    backend.init_forward_metadata(step.batch)
    made.prepare(step.batch)
    before = setup.states.conv(1).clone()
    ((x, weight, bias),) = given.convs
    expected = backend.convolve(x, weight, given.layer, step.batch, bias=bias)
    after = setup.states.conv(1).clone()
    setup.states.conv(1).copy_(before)
    out = torch.empty_like(expected)
    made.run(ConvCall(x, weight, bias, False, given.layer, 0, out), step.batch)
    assert torch.equal(out, expected)
    assert after[1:].nan_to_num(7).equal(setup.states.conv(1)[1:].nan_to_num(7))


@pytest.mark.parametrize("name", ["gdn-extend", "kda-extend", "lightning-extend"])
def test_long_prompts_of_few_heads_go_in_spans(name) -> None:
    case = next(case for case in linear_cases() if case.name == name)
    lengths = extend((3, 330), (0, 0), (0, 64), (5, 450), trailing=2)
    case = replace(case, dtype="float32", num_k_heads=1, num_v_heads=1, steps=(lengths,))
    setup = make_linear_setup(case, CANDIDATE.platform, "cpu")
    step = prepare_linear(setup, lengths, host_lens=True)
    given = step.inputs[0]
    states = setup.states.state(given.layer.layer_id)
    start = states.clone()

    def answer(backend: LinearAttentionBackend) -> tuple[torch.Tensor, torch.Tensor]:
        states.copy_(start)
        backend.init_forward_metadata(step.batch)
        qkv = given.q, given.k, given.v
        out = backend.forward(*qkv, given.layer, step.batch, g=given.g, beta=given.beta)
        return out, states.clone()

    exact = answer(TorchLinearBackend(setup.context))
    backend = TritonLinearBackend(setup.context)
    backend.least_span = 1
    for compute_units in (1, 32, 1000):
        backend.device = LinearDevice(compute_units=compute_units)
        torch.testing.assert_close(answer(backend), exact, rtol=1e-5, atol=1e-5)


@triton.jit
def invert(met, inverse, IS_BOUNDED: tl.constexpr):
    place = tl.arange(0, 64)
    places = place[:, None] * 64 + place[None, :]
    tl.store(inverse + places, inverted(tl.load(met + places), place, IS_BOUNDED, "tf32"))


@pytest.mark.parametrize("beta", [0.5, 1.0, 2.0])
def test_unit_keys_are_inverted_in_float16(beta) -> None:
    keys = torch.randn(64, 32)
    keys[32:] += 4 * keys[:32]  # Some are nearly the same
    keys /= keys.norm(dim=1, keepdim=True)
    met = torch.tril(beta * keys @ keys.T, -1)
    found = {bounded: torch.empty(64, 64) for bounded in (True, False)}
    for is_bounded, inverse in found.items():
        invert[(1,)](met, inverse, is_bounded)
    exact = torch.linalg.inv(torch.eye(64, dtype=torch.float64) + met.double())
    assert exact.abs().max() <= max(1, beta) + 1e-5
    torch.testing.assert_close(found[False].double(), exact, rtol=0, atol=1e-4)
    torch.testing.assert_close(found[True].double(), exact, rtol=0, atol=0.01)
