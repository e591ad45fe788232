"""Graphs of DRAFT_EXTEND steps, whose requests have as many new tokens each."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from attnmux.core import ForwardMode, GraphConfig, GraphRunner, InvalidInput, ModelInput, Platform
from attnmux.core.plugin import KernelLibrary
from attnmux.nvidia.fa3.backend import FA3Backend
from attnmux.nvidia.fa3.layers import FA3Kernels
from attnmux.testing import (
    Case,
    FakeBackend,
    GraphFakeBackend,
    RecordingGraphs,
    extend,
    fake_platform,
    make_setup,
    prepare_step,
)

FA3 = KernelLibrary.imported(FA3Kernels, "attnmux.emulators.nvidia.sgl_flash_attn")
NUM = 4
"""New tokens of each request."""


def catching_up(*prefixes, new=NUM):
    return extend(*((prefix, new) for prefix in prefixes), mode=ForwardMode.DRAFT_EXTEND)


STEPS = (
    catching_up(9, 16, 0),
    catching_up(31, 7),
    catching_up(5),
    catching_up(40, 3, 8, 11),
    catching_up(6, 2, new=3),
)
BACKENDS = {
    "fake": (fake_platform(), "float32", GraphFakeBackend),
    "fa3": (
        Platform.parse("nvidia:sm90,cuda=13.0"),
        "bfloat16",
        lambda context: FA3Backend(context, {"num_splits": 0}, FA3),
    ),
}


def a_setup(name, page_size):
    platform, dtype, _ = BACKENDS[name]
    case = Case(name="runs", steps=STEPS, dtype=dtype, page_size=page_size, windows=(None,))
    return make_setup(case, platform, "cpu", seed=random.randrange(1 << 30))


def captured(setup, backend, sizes=(2, 4)):
    layer = setup.context.layers[0]
    dtype = setup.context.token_to_kv_pool.dtype

    def forward(batch, inputs):
        return backend.forward(inputs["q"], inputs["k"], inputs["v"], layer, batch)

    shapes = {
        "q": (layer.tp_q_head_num, layer.qk_head_dim),
        "k": (layer.tp_k_head_num, layer.qk_head_dim),
        "v": (layer.tp_k_head_num, layer.v_head_dim),
    }
    config = GraphConfig(
        batch_sizes=sizes,
        forward_mode=ForwardMode.DRAFT_EXTEND,
        tokens_per_request=NUM,
        host_lens=True,
    )
    inputs = {name: ModelInput(dtype=dtype, trailing=shape) for name, shape in shapes.items()}
    runner = GraphRunner(backend, forward, config, devices=RecordingGraphs(), inputs=inputs)
    runner.capture()
    return runner


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("name", BACKENDS)
def test_each_token_has_the_references_answer(name, page_size) -> None:
    setup = a_setup(name, page_size)
    runner = captured(setup, BACKENDS[name][2](setup.context))
    reference, layer = FakeBackend(setup.context), setup.context.layers[0]
    limit = 1e-5 if name == "fake" else 2e-2
    for number in (0, 1, 2, 3, 0):
        prepared = prepare_step(setup, STEPS[number], host_lens=True)
        batch, (given,) = prepared.batch, prepared.inputs
        assert runner.can_run(batch)
        ours = runner.replay(batch, {"q": given.q, "k": given.k, "v": given.v})
        reference.init_forward_metadata(batch)
        # Its own keys are those that the graph wrote
        theirs = reference.forward(given.q, None, None, layer, batch)
        torch.testing.assert_close(ours, theirs, atol=limit, rtol=limit)
        theirs = reference.forward(given.q, given.k, given.v, layer, batch)
        torch.testing.assert_close(ours, theirs, atol=limit, rtol=limit)


@pytest.mark.parametrize(
    ("changes", "argument"),
    [
        ({"extend_seq_lens_cpu": None}, "extend_seq_lens_cpu"),
        ({"extend_prefix_lens_cpu": None}, "extend_seq_lens_cpu"),
        ({"extend_prefix_lens": None}, "extend_seq_lens_cpu"),
        ({"extend_seq_lens_cpu": torch.tensor([5, 4, 3])}, "extend_seq_lens"),
        ({"forward_mode": ForwardMode.EXTEND}, "forward_mode"),
        ({"forward_mode": ForwardMode.TARGET_VERIFY}, "forward_mode"),
    ],
)
def test_other_steps_run_eagerly(changes, argument) -> None:
    setup = a_setup("fake", 4)
    runner = captured(setup, GraphFakeBackend(setup.context))
    batch = replace(prepare_step(setup, STEPS[0], host_lens=True).batch, **changes)
    assert not runner.can_run(batch)
    with pytest.raises(InvalidInput) as refused:
        runner.replay(batch)
    assert refused.value.argument == argument


def test_fewer_tokens_and_more_requests_run_eagerly() -> None:
    setup = a_setup("fake", 4)
    runner = captured(setup, GraphFakeBackend(setup.context), (2,))
    served = [runner.can_run(prepare_step(setup, each, host_lens=True).batch) for each in STEPS]
    assert served == [False, True, True, False, False]
