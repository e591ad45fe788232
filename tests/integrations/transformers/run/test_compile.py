"""Compiled models: attention is one op a layer, and text and logits are the same."""

from __future__ import annotations

import shutil
from typing import ClassVar

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters

from attnmux.core import Offer
from attnmux.testing import RecordingGraphs, fake_platform, graph_card
from attnmux.transformers import (
    Engine,
    ModelRunner,
    RunnerOptions,
    SequenceState,
    load_runner,
    open_checkpoint,
)
from attnmux.transformers.run.compiled import compile_layers, undo
from attnmux.transformers.run.linears import KernelLinear, multiply_by

OP = torch.ops.attnmux.attention_with_output


@pytest.fixture(autouse=True)
def _forget_graphs():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def prompts():
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(97, (n,), generator=generator).tolist() for n in (13, 5, 20)]


def prefill_and_decode(runner):
    states = [SequenceState(token_ids=ids) for ids in prompts()]
    prefill = runner.extend(states)
    for state, token in zip(states, prefill.argmax(-1).tolist(), strict=True):
        state.token_ids.append(token)
    decode = runner.decode(states)
    runner.release(states)
    return prefill, decode


@pytest.mark.parametrize("architecture", [pytest.param("llama", marks=pytest.mark.full), "gpt-oss"])
def test_the_whole_model_is_one_graph(tiny, run_on, architecture):
    runner = run_on(tiny(architecture)[1], page_size=16)
    for layer in runner.model.modules():  # compiled code multiplies by torch
        if isinstance(layer, KernelLinear):
            layer.__class__ = torch.nn.Linear
    plain = prefill_and_decode(runner)
    graphs = []

    def keep(graph, _):
        graphs.append(graph)
        return graph.forward

    runner.model = torch.compile(runner.model, fullgraph=True, backend=keep)
    compiled = prefill_and_decode(runner)
    assert graphs
    for graph in graphs:
        assert sum(node.target is OP for node in graph.graph.nodes) == 3
    for ours, theirs in zip(compiled, plain, strict=True):
        torch.testing.assert_close(ours, theirs, atol=0, rtol=0)


@pytest.mark.full
def test_through_aot_autograd(tiny, run_on):
    """The op's fake implementation and the mutation of its output are functionalised here."""
    runner = run_on(tiny("gemma2")[1], page_size=1)
    plain = prefill_and_decode(runner)
    runner.model = torch.compile(runner.model, fullgraph=True, backend="aot_eager")
    for ours, theirs in zip(prefill_and_decode(runner), plain, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


ENGINE_STEPS = {"max_batch_size": 4, "debug": False, "graph": False}


def generated(runner, new=12):
    """Greedy answers under continuous batching, with chunks of prompts and reused prefixes."""
    engine = Engine(runner, max_running=3, prefill_tokens=11)
    shared = prompts()[2][:9]
    wanted = [engine.add([*shared, *ids], max_new_tokens=new) for ids in prompts()]
    answers = {}
    while engine.has_work:
        for output in engine.step():
            if output.result is not None:
                answers[output.request_id] = output.result.token_ids
    engine.clear_cache()
    return [answers[each] for each in wanted]


@pytest.mark.parametrize(
    ("architecture", "page_size", "compiler"),
    [
        ("llama", 1, "aot_eager"),
        ("gpt-oss", 16, "eager"),
        ("deepseek-v2", 1, "eager"),
        ("gemma2", 16, "aot_eager"),
        ("gpt-oss", 16, "aot_eager"),
        ("deepseek-v2", 1, "aot_eager"),
    ],
)
@pytest.mark.turns(5)
def test_compiled_layers_generate_the_same_text(tiny, run_on, architecture, page_size, compiler):
    folder = tiny(architecture)[1]
    plain = generated(run_on(folder, page_size=page_size, **ENGINE_STEPS))
    runner = run_on(folder, page_size=page_size, **ENGINE_STEPS)
    runner.compile(backend=compiler)
    made = counters["stats"]["unique_graphs"]
    assert generated(runner) == plain
    assert runner.is_compiled
    # The trial has compiled everything: one token and more, for each kind of layer.
    assert counters["stats"]["unique_graphs"] == made
    assert runner.steps.allocator.available_size() == runner.context.token_to_kv_pool.size


def kept_states(runner):
    """The hidden states of prompts and of a token after each."""
    states = [SequenceState(token_ids=ids) for ids in prompts()]
    for state, token in zip(states, runner.extend(states).argmax(-1).tolist(), strict=True):
        state.token_ids.append(token)
    runner.decode(states)
    table = runner.steps.req_to_token_pool.req_to_token
    found = [runner.steps.hidden.at(table[each.row, : each.num_cached].long()) for each in states]
    runner.release(states)
    return torch.cat(found)


def test_compiled_layers_keep_the_same_states(tiny, run_on):
    folder = tiny("llama")[1]
    given = {"hidden_states": True, "hidden_layers": (0, 2), **ENGINE_STEPS}
    plain = kept_states(run_on(folder, **given))
    runner = run_on(folder, **given)
    runner.compile(backend="eager")
    made = counters["stats"]["unique_graphs"]
    for _ in range(2):
        torch.testing.assert_close(kept_states(runner), plain, atol=1e-4, rtol=1e-4)
        runner.steps.hidden.states.zero_()
    assert counters["stats"]["unique_graphs"] == made


def test_one_layer_s_code_serves_all_that_are_alike(tiny, run_on):
    runner = run_on(tiny("llama")[1], page_size=16, **ENGINE_STEPS)
    counters.clear()
    runner.compile(backend="eager")
    assert counters["stats"]["unique_graphs"] == 2  # one token, and more


def test_absorbed_layers_share_the_forward_of_their_projections(tiny, run_on):
    runner = run_on(tiny("deepseek-v2")[1], page_size=1, mla="absorbed", **ENGINE_STEPS)
    found = [each for name, each in runner.model.named_modules() if name.endswith("kv_b_proj")]
    assert len(found) == 3
    assert len({id(each.forward) for each in found}) == 1


def captured_runner(folder):
    offer = Offer(card=graph_card(), plugin="fake", distribution="attnmux-fake", version="1.0")
    options = RunnerOptions(page_size=16, max_context_len=64, max_total_tokens=192, **ENGINE_STEPS)
    return load_runner(open_checkpoint(folder), fake_platform(), [offer], options)


def test_weights_move_once(tiny):
    """Graphs that are captured after the first compilation find the weights where they were."""
    runner = captured_runner(tiny("llama")[1])
    plain = generated(runner)
    runner.capture_graphs(devices=RecordingGraphs())
    runner.compile(backend="eager")
    assert runner.graphs is None
    undo(runner.model)
    places = [each.data_ptr() for each in runner.model.parameters()]
    assert compile_layers(runner.model, "eager")
    undo(runner.model)
    assert [each.data_ptr() for each in runner.model.parameters()] == places
    runner.is_compiled = False
    assert generated(runner) == plain


def test_compiled_layers_in_graphs(tiny, run_on):
    folder = tiny("llama")[1]
    plain = generated(run_on(folder, page_size=16, **ENGINE_STEPS))
    runner = captured_runner(folder)
    runner.compile(backend="eager")
    runner.capture_graphs(devices=RecordingGraphs())
    assert generated(runner) == plain


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")
@pytest.mark.turns(4, suite="compilers")
def test_inductor(tiny, run_on):
    folder = tiny("llama")[1]
    plain = generated(run_on(folder, page_size=16, **ENGINE_STEPS))
    runner = run_on(folder, page_size=16, compile=True, **ENGINE_STEPS)
    assert runner.is_compiled
    assert generated(runner) == plain


@torch.library.custom_op("attnmux_test::one_row", mutates_args=())
def one_row(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    OneRow.shapes.append(tuple(weight.shape))
    return torch.nn.functional.linear(x, weight, bias)


@one_row.register_fake
def _(x, weight, bias):
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


class OneRow:
    """A kernel for steps of one token that notes the weights that it reads."""

    op = torch.ops.attnmux_test.one_row.default
    fused = None
    shapes: ClassVar[list[tuple[int, ...]]] = []

    def rows(self, weight):
        return range(1, 2)

    def __call__(self, x, weight, bias):
        return one_row(x, weight, bias)


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")
@pytest.mark.turns(4, suite="compilers")
def test_merged_projections_are_one_call_of_a_kernel(tiny, run_on):
    folder = tiny("llama")[1]
    runner = run_on(folder, page_size=16, **ENGINE_STEPS)
    plain = generated(runner)
    for layer in runner.model.modules():
        if isinstance(layer, KernelLinear):  # of this CPU
            layer.__class__ = torch.nn.Linear
    multiply_by(OneRow(), runner.model)
    runner.compile()
    state = SequenceState(token_ids=prompts()[0])
    state.token_ids.append(int(runner.extend([state]).argmax()))
    OneRow.shapes.clear()
    runner.decode([state])
    runner.release([state])
    config = runner.model.config
    outputs = [
        (config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim,
        config.hidden_size,
        2 * config.intermediate_size,
        config.hidden_size,
    ]
    every = [rows for rows, _ in OneRow.shapes]
    assert every == [*outputs * config.num_hidden_layers, config.vocab_size]
    assert generated(runner) == plain


def test_a_compiler_that_fails_leaves_the_model_as_it_was(tiny, run_on):
    folder = tiny("llama")[1]
    plain = generated(run_on(folder, page_size=16, **ENGINE_STEPS))

    def broken(graph, inputs):
        raise RuntimeError("no such instruction\npages of more")

    runner = run_on(folder, page_size=16, **ENGINE_STEPS)
    with pytest.raises(BackendCompilerFailed, match="no such instruction"):
        runner.compile(backend=broken)
    assert not runner.is_compiled
    assert generated(runner) == plain
    assert runner.steps.allocator.available_size() == runner.context.token_to_kv_pool.size


def test_a_failed_compilation_is_a_warning(tiny, run_on, monkeypatch):
    def fail(runner, backend="inductor"):
        raise RuntimeError("no such instruction\npages of more")

    monkeypatch.setattr(ModelRunner, "compile", fail)
    with pytest.warns(UserWarning, match="runs uncompiled: RuntimeError: no such instruction$"):
        runner = run_on(tiny("llama")[1], page_size=16, compile=True, **ENGINE_STEPS)
    assert not runner.is_compiled
