"""Extend steps through a compiled model, padded to a few numbers of tokens."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import torch

from attnmux.core.errors import InvalidInput
from attnmux.core.graph.config import ModelInput
from attnmux.core.graph.piecewise import PiecewiseRunner, compile_in_pieces
from attnmux.core.op import attention_with_output, forward_context
from attnmux.core.radix_attention import RadixAttention
from attnmux.testing import (
    Case,
    FakeBackend,
    decode,
    extend,
    fake_platform,
    make_setup,
    prepare_step,
)

STEPS = (extend((0, 7), (5, 4)), extend((3, 1), (8, 12)), extend((0, 3)))
CASE = Case(name="piecewise", steps=STEPS, dtype="float32", page_size=4, head_dim=16, v_head_dim=16)


class Model(torch.nn.Module):
    """Embeds, attends twice, and notes the number of rows that it is traced with."""

    def __init__(self, setup) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(map(RadixAttention, setup.context.layers))
        heads = CASE.num_q_heads + 2 * CASE.num_kv_heads
        self.qkv = torch.nn.Linear(32, heads * 16)
        self.out = torch.nn.Linear(CASE.num_q_heads * 16, 32)
        self.embedding = torch.nn.Embedding(50, 32)

    def forward(self, batch, inputs):
        hidden = self.embedding(inputs["input_ids"]) + batch.positions[:, None].sin()
        widths = [CASE.num_q_heads * 16, CASE.num_kv_heads * 16, CASE.num_kv_heads * 16]
        for layer in self.layers:
            q, k, v = self.qkv(hidden).split(widths, -1)
            hidden = hidden + self.out(layer(q, k, v, batch).flatten(1))
        return {"hidden": hidden, "of_three": hidden * inputs["places"].sum(0)[:, None]}


@dataclass(kw_only=True)
class Compiler:
    """Counts what it compiles, on a backend of torch.compile that needs no C++."""

    graphs: list[torch.fx.GraphModule] = field(default_factory=list)

    def __call__(self, forward):
        def keep(graph: torch.fx.GraphModule, _: list[torch.Tensor]):
            self.graphs.append(graph)
            return graph

        return torch.compile(forward, dynamic=True, fullgraph=True, backend=keep)


@pytest.fixture
def setup():
    torch.compiler.reset()
    torch.manual_seed(0)
    yield make_setup(CASE, fake_platform(), "cpu")
    torch.compiler.reset()


def inputs_of(batch):
    ids = torch.arange(batch.num_tokens) * 7 % 50
    return {"input_ids": ids, "places": torch.stack([ids, ids + 1, ids + 2])}


INPUTS = {
    "input_ids": ModelInput(dtype=torch.int64),
    "places": ModelInput(dtype=torch.int64, leading=(3,)),
}


def check(setup, compiler) -> PiecewiseRunner:
    """Padded steps equal eager ones, in outputs and in the KV pool."""
    backend, model = FakeBackend(setup.context), Model(setup)
    runner = PiecewiseRunner(
        backend, model, [32, 16, 4], inputs=INPUTS, compiler=compiler, progress=iter
    )
    before = [buffer.clone() for buffer in setup.context.token_to_kv_pool.get_kv_buffer(1)]
    runner.capture()
    pool = setup.context.token_to_kv_pool
    assert all(map(torch.equal, before, pool.get_kv_buffer(1)))
    for step in STEPS:
        batch = prepare_step(setup, step).batch
        assert runner.can_run(batch)
        backend.init_forward_metadata(batch)
        with torch.no_grad(), forward_context(backend, batch):
            expected = model(batch, inputs_of(batch))
        written = [buffer.clone() for buffer in pool.get_kv_buffer(1)]
        with torch.inference_mode(step is STEPS[1]):
            actual = runner.run(batch, inputs_of(batch))
        torch.testing.assert_close(actual, expected)
        for buffer, copy in zip(pool.get_kv_buffer(1), written, strict=True):
            torch.testing.assert_close(buffer, copy, equal_nan=True)
    return runner


def test_padded_steps_equal_eager_ones(setup) -> None:
    compiler = Compiler()
    check(setup, compiler)
    assert len(compiler.graphs) == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_inductor_on_a_cpu_splits_nothing(setup) -> None:
    check(setup, compile_in_pieces)


def test_serves_extend_steps_that_fit(setup) -> None:
    backend = FakeBackend(setup.context)
    runner = PiecewiseRunner(backend, Model(setup), [4], inputs=INPUTS, compiler=Compiler())
    for step, expected in (
        (extend((0, 4)), True),
        (extend((0, 5)), False),
        (extend((4, 0)), False),
        (decode(4, 5), False),
    ):
        assert runner.can_run(prepare_step(setup, step).batch) is expected
    batch = prepare_step(setup, extend((0, 5))).batch
    with pytest.raises(InvalidInput, match=r"an extend step of 1 to 4 tokens, .*got EXTEND of 5"):
        runner.run(batch, inputs_of(batch))
    picks = torch.zeros((3, 2), dtype=torch.int32)
    sparse = replace(prepare_step(setup, extend((0, 3))).batch, topk_indices=picks)
    assert not runner.can_run(sparse)


def test_refuses_inputs_that_do_not_fit(setup) -> None:
    runner = PiecewiseRunner(
        FakeBackend(setup.context), Model(setup), [4], inputs=INPUTS, compiler=Compiler()
    )
    batch = prepare_step(setup, extend((0, 4))).batch
    with pytest.raises(
        InvalidInput, match=r"input_ids: expected torch\.int64 of shape \(4,\), got None"
    ):
        runner.run(batch)
    unknown = {**inputs_of(batch), "lora_ids": batch.positions}
    with pytest.raises(InvalidInput, match=r"inputs: expected .*'places', .* got 'lora_ids'"):
        runner.run(batch, unknown)
    with pytest.raises(InvalidInput, match="token_counts"):
        PiecewiseRunner(FakeBackend(setup.context), Model(setup), [1, 4])


def test_padding_of_a_compiled_model_attends_to_nothing(setup) -> None:
    backend = FakeBackend(setup.context)
    step = prepare_step(setup, extend((0, 3), (2, 1)))
    given, layer = step.inputs[0], setup.context.layers[0]
    backend.init_forward_metadata(step.batch)
    expected = backend.forward(given.q, given.k, given.v, layer, step.batch)
    padded = [torch.nn.functional.pad(t, (0, 0, 0, 0, 0, 5)) for t in (given.q, given.k, given.v)]
    out = torch.full((9, *expected.shape[1:]), torch.nan)
    lse = torch.full(out.shape[:2], torch.nan)
    with forward_context(backend, step.batch):
        attention_with_output(*padded, None, None, out, lse, layer.layer_id, True)
    assert torch.equal(out[:4], expected)
    assert not out[4:].any()
    assert bool(lse[:4].isfinite().all())
    assert bool((lse[4:] == -torch.inf).all())
