"""torch.compile passes over the op: one graph, one op a layer, the same logits."""

from __future__ import annotations

import pytest
import torch

from attnmux.transformers import SequenceState

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


@pytest.mark.parametrize("architecture", ["llama", "gpt-oss"])
def test_the_whole_model_is_one_graph(tiny, run_on, architecture):
    runner = run_on(tiny(architecture)[1], page_size=16)
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


def test_through_aot_autograd(tiny, run_on):
    """The op's fake implementation and the mutation of its output are functionalised here."""
    runner = run_on(tiny("gemma2")[1], page_size=1)
    plain = prefill_and_decode(runner)
    runner.model = torch.compile(runner.model, fullgraph=True, backend="aot_eager")
    for ours, theirs in zip(prefill_and_decode(runner), plain, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
