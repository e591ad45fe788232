"""The op that compiled models call, and the step that it finds."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from attnmux.core import AttnmuxError, ForwardContext, InvalidInput, RadixAttention
from attnmux.testing import (
    Case,
    CaseSetup,
    FakeBackend,
    PreparedStep,
    decode,
    extend,
    fake_platform,
    make_setup,
    prepare_step,
)

LATENT = {"kind": "mla", "num_kv_heads": 1, "kv_lora_rank": 32, "qk_rope_head_dim": 8}


class Model(torch.nn.Module):
    """Every layer of a setup, with something to compile around each."""

    def __init__(self, setup: CaseSetup) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(map(RadixAttention, setup.context.layers))

    def forward(self, inputs, batch) -> torch.Tensor:
        total = torch.zeros(())
        for layer, (q, k, v, q_rope, k_rope) in zip(self.layers, inputs, strict=True):
            out = layer(q * 2, k, v, batch, q_rope=q_rope, k_rope=k_rope)
            total = total + out.float().square().sum(dim=(1, 2))
        return total


def inputs_of(step: PreparedStep) -> list[tuple[torch.Tensor | None, ...]]:
    return [(x.q, x.k, x.v, x.q_rope, x.k_rope) for x in step.inputs]


def setup_of(*steps: object, **settings: object) -> CaseSetup:
    case = Case(name="op", steps=steps, page_size=4, **settings)
    return make_setup(case, fake_platform(), "cpu", seed=5)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("steps", "settings"),
    [
        ((extend((3, 5), (0, 4)), extend((0, 2), (6, 7))), {}),
        ((decode(3, 9, 4), decode(8, 1, 2)), {}),
        ((decode(3, 9), decode(8, 1)), {"kv_in_pool": True}),
        ((decode(3, 9), decode(8, 1)), LATENT),
        ((extend((3, 5)), extend((1, 5))), {**LATENT, "kv_in_pool": True}),
    ],
    ids=["extend", "decode", "k-is-none", "mla", "mla-k-is-none"],
)
def test_a_model_compiles_as_one_graph(steps, settings) -> None:
    """One graph serves steps whose lengths differ, and gives what eager gives."""
    setup = setup_of(*steps, **settings)
    backend = FakeBackend(setup.context)
    model = Model(setup)
    graphs: list[torch.fx.GraphModule] = []

    def capture(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    compiled = torch.compile(model, fullgraph=True, backend=capture)
    for lengths in steps:
        step = prepare_step(setup, lengths)
        backend.init_forward_metadata(step.batch)
        with ForwardContext.enter(backend, step.batch), torch.no_grad():
            eager = model(inputs_of(step), step.batch)
            torch.testing.assert_close(compiled(inputs_of(step), step.batch), eager)
    assert len(graphs) == 1
    called = [node.target for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert sum("attention_with_output" in str(target) for target in called) == 2


def test_the_op_survives_functionalisation() -> None:
    """The op declares its writes, so that a compiler keeps and orders them."""
    setup = setup_of(extend((3, 5)))
    step = prepare_step(setup, setup.case.steps[0])
    backend = FakeBackend(setup.context)
    backend.init_forward_metadata(step.batch)
    model = Model(setup)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with ForwardContext.enter(backend, step.batch), torch.no_grad():
        torch.testing.assert_close(
            compiled(inputs_of(step), step.batch), model(inputs_of(step), step.batch)
        )


class IndexedModel(Model):
    """Each layer's indexer writes the batch's picks in place, before the layer."""

    def forward(self, inputs, batch) -> torch.Tensor:
        total = torch.zeros(())
        for layer, (q, k, v, q_rope, k_rope, picks) in zip(self.layers, inputs, strict=True):
            batch.topk_indices.copy_(picks)
            out = layer(q, k, v, batch, q_rope=q_rope, k_rope=k_rope)
            total = total + out.float().square().sum(dim=(1, 2))
        return total


@pytest.mark.parametrize("steps", [(decode(30, 9, 4),), (extend((20, 5), (0, 4)),)])
def test_what_a_compiled_indexer_writes_is_read_by_its_own_layer(steps) -> None:
    """Functionalisation moves the writes after all ops."""
    setup = setup_of(*steps, **{**LATENT, "kind": "nsa", "index_topk": 6})
    step = prepare_step(setup, setup.case.steps[0])
    backend = FakeBackend(setup.context)
    backend.init_forward_metadata(step.batch)
    model = IndexedModel(setup)
    given = [(*each, x.topk_indices) for each, x in zip(inputs_of(step), step.inputs, strict=True)]
    assert not torch.equal(given[0][-1], given[1][-1])
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with ForwardContext.enter(backend, step.batch), torch.no_grad():
        torch.testing.assert_close(compiled(given, step.batch), model(given, step.batch))


def test_heads_may_come_flattened() -> None:
    setup = setup_of(decode(3, 9))
    step = prepare_step(setup, setup.case.steps[0])
    backend = FakeBackend(setup.context)
    backend.init_forward_metadata(step.batch)
    given = step.inputs[0]
    attention = RadixAttention(given.layer)
    with ForwardContext.enter(backend, step.batch):
        whole = attention(given.q, given.k, given.v, step.batch)
        flat = attention(given.q.flatten(1), given.k.flatten(1), given.v.flatten(1), step.batch)
    assert torch.equal(whole, flat)


def test_the_three_queries_of_a_head_may_come_flattened() -> None:
    setup = setup_of(decode(3, 19), kind="dual_chunk", dual_chunk_len=8)
    step = prepare_step(setup, setup.case.steps[0])
    backend = FakeBackend(setup.context)
    backend.init_forward_metadata(step.batch)
    given = step.inputs[0]
    attention = RadixAttention(given.layer)
    with ForwardContext.enter(backend, step.batch):
        whole = attention(given.q, given.k, given.v, step.batch)
        flat = attention(given.q.flatten(1), given.k.flatten(1), given.v.flatten(1), step.batch)
    assert torch.equal(whole, flat)


def test_the_rotary_parts_may_come_flattened_too() -> None:
    setup = setup_of(decode(3, 9), **LATENT)
    step = prepare_step(setup, setup.case.steps[0])
    backend = FakeBackend(setup.context)
    backend.init_forward_metadata(step.batch)
    ((q, k, v, q_rope, k_rope), *_) = inputs_of(step)
    attention = RadixAttention(step.inputs[0].layer)
    with ForwardContext.enter(backend, step.batch):
        whole = attention(q, k, v, step.batch, q_rope=q_rope, k_rope=k_rope)
        ropes = {"q_rope": q_rope.flatten(1), "k_rope": k_rope.flatten(1)}
        assert torch.equal(attention(q, k, v, step.batch, **ropes), whole)


def test_heads_may_come_in_any_memory_order() -> None:
    setup = setup_of(extend((0, 6)))
    step = prepare_step(setup, setup.case.steps[0])
    backend = FakeBackend(setup.context)
    backend.init_forward_metadata(step.batch)
    given = step.inputs[0]
    heads_first = given.q.view(2, 3, 8, 128).transpose(1, 2).contiguous()
    attention = RadixAttention(given.layer)
    with ForwardContext.enter(backend, step.batch):
        expected = attention(given.q, given.k, given.v, step.batch)
        result = attention(heads_first.transpose(1, 2), given.k, given.v, step.batch)
    assert torch.equal(result, expected)


@pytest.mark.parametrize("shape", [(3, 8, 127), (3, 4, 128), (3, 1000), (6,)])
def test_heads_that_do_not_fit_are_named(shape) -> None:
    setup = setup_of(decode(3, 9, 4))
    step = prepare_step(setup, setup.case.steps[0])
    with (
        ForwardContext.enter(FakeBackend(setup.context), step.batch),
        pytest.raises(InvalidInput, match=r"q: expected \[T, 8, 128\] or \[T, 1024\]"),
    ):
        RadixAttention(step.inputs[0].layer)(torch.zeros(shape), None, None, step.batch)


def test_the_op_writes_out_and_lse() -> None:
    setup = setup_of(decode(3, 9))
    step = prepare_step(setup, setup.case.steps[0])
    backend = FakeBackend(setup.context)
    backend.init_forward_metadata(step.batch)
    given = step.inputs[1]
    out = torch.full_like(given.q, torch.nan)
    lse = torch.full(given.q.shape[:2], torch.nan)
    with ForwardContext.enter(backend, step.batch):
        nothing = RadixAttention.op(
            given.q,
            given.k,
            given.v,
            None,
            None,
            out,
            lse,
            torch.tensor(given.layer.layer_id),
            True,
        )
        expected = backend.forward(given.q, None, None, given.layer, step.batch)
    assert nothing is None
    assert torch.equal(out, expected)
    assert bool(lse.isfinite().all())


@pytest.mark.parametrize(
    ("lengths", "settings"),
    [
        (extend((3, 5), (0, 4)), {}),
        (extend((1, 5)), LATENT),
        # As many encoder tokens as Q has rows with its padding: these are no padding.
        (extend((0, 5), encoder=(8,)), {}),
    ],
    ids=["mha", "mla", "cross"],
)
def test_padding_after_the_tokens_attends_to_nothing(lengths, settings) -> None:
    setup = setup_of(lengths, **settings)
    step = prepare_step(setup, lengths)
    backend = FakeBackend(setup.context)
    backend.init_forward_metadata(step.batch)
    padding = 3
    for given in step.inputs:
        layer, num_tokens = given.layer, given.q.shape[0]
        expected = backend.forward(
            given.q, given.k, given.v, layer, step.batch, q_rope=given.q_rope, k_rope=given.k_rope
        )
        q, k, v, q_rope, k_rope = (
            x
            if x is None or (layer.is_cross_attention and x is not given.q)
            else torch.cat([x, torch.full_like(x[:1], torch.nan).expand(padding, -1, -1)])
            for x in (given.q, given.k, given.v, given.q_rope, given.k_rope)
        )
        out = torch.full((num_tokens + padding, *expected.shape[1:]), torch.nan, dtype=q.dtype)
        lse = torch.full(out.shape[:2], torch.nan)
        with ForwardContext.enter(backend, step.batch):
            RadixAttention.op(q, k, v, q_rope, k_rope, out, lse, torch.tensor(layer.layer_id), True)
        assert torch.equal(out[:num_tokens], expected)
        assert not out[num_tokens:].any()
        assert bool(torch.isneginf(lse[num_tokens:]).all())


def test_the_op_stays_outside_of_device_graphs() -> None:
    op = torch.ops.attnmux.attention_with_output.default
    assert torch.Tag.cudagraph_unsafe in op.tags
    mutated = [arg.name for arg in op._schema.arguments if arg.alias_info is not None]
    assert mutated == ["out", "lse"]


def test_the_op_runs_on_fake_tensors_without_a_step() -> None:
    with FakeTensorMode():
        q = torch.empty(3, 8, 128)
        RadixAttention.op(
            q, None, None, None, None, torch.empty_like(q), None, torch.tensor(1), True
        )


def test_attention_outside_a_step_says_what_to_do() -> None:
    setup = setup_of(decode(3))
    step = prepare_step(setup, setup.case.steps[0])
    given = step.inputs[0]
    with pytest.raises(
        AttnmuxError, match=r"with attnmux\.core\.ForwardContext\.enter\(backend, batch\)"
    ):
        RadixAttention(given.layer)(given.q, given.k, given.v, step.batch)


def test_another_batch_than_the_running_one_is_refused() -> None:
    setup = setup_of(decode(3))
    step = prepare_step(setup, setup.case.steps[0])
    given = step.inputs[0]
    backend = FakeBackend(setup.context)
    with (
        ForwardContext.enter(backend, replace(step.batch)),
        pytest.raises(InvalidInput, match="another batch"),
    ):
        RadixAttention(given.layer)(given.q, given.k, given.v, step.batch)


def test_contexts_nest_and_end_with_an_exception() -> None:
    setup = setup_of(decode(3))
    batch = prepare_step(setup, setup.case.steps[0]).batch
    outer, inner = FakeBackend(setup.context), FakeBackend(setup.context)
    with ForwardContext.enter(outer, batch) as context:
        assert ForwardContext.current() is context
        with suppress(ZeroDivisionError), ForwardContext.enter(inner, batch):
            assert ForwardContext.current().backend is inner
            raise ZeroDivisionError
        assert ForwardContext.current().backend is outer
    with pytest.raises(AttnmuxError):
        ForwardContext.current()


def test_a_context_belongs_to_its_thread() -> None:
    setup = setup_of(decode(3))
    batch = prepare_step(setup, setup.case.steps[0]).batch
    seen: list[Exception] = []

    def look() -> None:
        try:
            ForwardContext.current()
        except AttnmuxError as error:
            seen.append(error)

    with ForwardContext.enter(FakeBackend(setup.context), batch):
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    assert len(seen) == 1
