"""Layers of convolutions alone on sgl_kernel's, emulated."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attnmux.core import BackendFailed, InvalidInput
from attnmux.emulators.candidates import CONVOLUTIONS, EMULATED_LINEAR
from attnmux.nvidia.linear.sgl_conv import SglConvBackend, make
from attnmux.testing import AttentionBackendTests, decode, extend, verify
from attnmux.testing.adapters.tests import recorded
from attnmux.testing.cases.linear import SHAPES, LinearCase
from attnmux.testing.setup.linear import LinearSetup, make_linear_setup, prepare_linear

CANDIDATE = EMULATED_LINEAR["sgl_conv"].make()


class TestSglConvEmulated(AttentionBackendTests):
    backend = CANDIDATE
    sampled = 12


def setup_of(*steps, kind="conv") -> LinearSetup:
    case = LinearCase(name="adapter", kind=kind, steps=steps, **{**SHAPES[kind]})
    return make_linear_setup(case, CANDIDATE.platform, "cpu")


@pytest.mark.parametrize("step", [decode(4), extend((0, 3)), verify(2, 4)])
def test_recurrences_are_refused(step) -> None:
    setup = setup_of(step, kind="gdn")
    made = prepare_linear(setup, step, host_lens=True)
    backend, given = SglConvBackend(setup.context, {}, CONVOLUTIONS), made.inputs[0]
    backend.init_forward_metadata(made.batch)
    qkv = given.q, given.k, given.v
    with pytest.raises(InvalidInput, match=r"expected kind 'conv', got kind 'gdn'"):
        backend.forward(*qkv, given.layer, made.batch, g=given.g, beta=given.beta)


def test_the_trial_runs_each_phase() -> None:
    kernels, calls = recorded(CONVOLUTIONS)
    setup = setup_of(extend((0, 3)), decode(4), verify(2, 4))
    library = replace(make, providers={"ours": lambda: kernels})
    assert isinstance(library(setup.context, {}), SglConvBackend)
    names = ["causal_conv1d_fwd", "causal_conv1d_update", "causal_conv1d_update"]
    assert sorted(call.name for call in calls) == names
    assert not any(buffer[1:].any() for buffer in setup.states.buffers)


def test_a_library_that_does_not_run_is_a_reason() -> None:
    def failing(*_: torch.Tensor) -> None:
        raise RuntimeError("no kernel image is available for this device")

    library = replace(
        make, providers={"broken": lambda: replace(CONVOLUTIONS, causal_conv1d_update=failing)}
    )
    with pytest.raises(BackendFailed, match="no kernel image"):
        library(setup_of(decode(4)).context, {})
