"""Prompts in pieces: attention runs between graphs, and texts are the same."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from dataclasses import replace

import pytest
import torch
from torch._dynamo.utils import counters

from attnmux.core import Chooser, DeviceGraphs, GraphUnsupported, InvalidInput, Plugins
from attnmux.core.plugin import CapturedGraph
from attnmux.testing import RecordingGraphs
from attnmux.transformers import (
    Engine,
    RunnerOptions,
    SequenceState,
    load_runner,
    open_checkpoint,
)
from attnmux.transformers.options import PIECE_SIZES, usual_pieces
from attnmux.transformers.requests.memory_budget import MemoryBudget
from attnmux.transformers.run import pieces
from attnmux.transformers.run.memory import allocate

OPTIONS = {"max_batch_size": 4, "debug": False, "graph": False}


def prompts():
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(97, (n,), generator=generator).tolist() for n in (13, 5, 20)]


class Steps:
    """Counts a runner's steps over prompts."""

    def __init__(self, runner):
        self.in_pieces, self.eager = [], []
        replay, logits = runner.pieces.replay, runner.logits

        def replayed(batch, inputs, keep):
            self.in_pieces.append((batch.forward_mode.name, batch.num_tokens))
            return replay(batch, inputs, keep)

        def called(batch, inputs, keep=None):
            if batch.forward_mode.is_extend():
                self.eager.append(batch.num_tokens)
            return logits(batch, inputs, keep)

        runner.pieces.replay, runner.logits = replayed, called


def in_pieces(runner, sizes=(8, 16, 24)):
    runner.capture_pieces(sizes=sizes, devices=RecordingGraphs())
    return Steps(runner)


def generated(runner, new=12, prefill_tokens=11):
    """Greedy answers under continuous batching, with chunks of prompts and reused prefixes."""
    engine = Engine(runner, max_running=3, prefill_tokens=prefill_tokens)
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
    ("architecture", "changes"),
    [
        ("llama", {}),
        ("qwen2", {"page_size": 16}),
        ("gemma2", {"page_size": 16}),
        ("gpt2", {}),
        ("gpt-oss", {"page_size": 16}),
        ("llama4", {}),
        ("deepseek-v2", {"mla": "absorbed"}),
        ("deepseek-v2", {"mla": "expanded"}),
    ],
)
def test_texts_are_the_same(tiny, run_on, architecture, changes):
    runner = run_on(tiny(architecture)[1], **changes, **OPTIONS)
    plain = generated(runner)
    steps = in_pieces(runner)
    assert generated(runner) == plain
    assert not steps.eager
    assert {mode for mode, _ in steps.in_pieces} == {"EXTEND", "MIXED"}
    assert {count for _, count in steps.in_pieces} > {11}


def test_compiled_layers_in_pieces(tiny, run_on):
    torch._dynamo.reset()
    folder = tiny("gpt-oss")[1]
    plain = generated(run_on(folder, page_size=16, **OPTIONS))
    runner = run_on(folder, page_size=16, **OPTIONS)
    runner.compile(backend="eager")
    steps = in_pieces(runner)
    assert generated(runner) == plain
    assert steps.in_pieces
    assert not steps.eager
    runner.compile(backend="eager")
    assert runner.pieces is None
    torch._dynamo.reset()


class Cuts(DeviceGraphs):
    """Captures nothing, and notes what runs inside of pieces. The model's code stays compiled."""

    def __init__(self):
        self.notes = []

    session = nullcontext
    capture = None

    def warm_up(self, step):
        step.run()

    @contextmanager
    def piece(self):
        self.notes.append("begin")
        yield CapturedGraph(replay=lambda: None)
        self.notes.append("end")

    def unowned(self, tensor):
        assert self.notes[-1] == "end"
        return tensor


@pytest.mark.turns(over="architecture")
@pytest.mark.parametrize("architecture", ["gpt-oss", "deepseek-v2"])
def test_compiled_code_is_cut_at_its_attention(tiny, run_on, architecture):
    """The op of attention ends a piece inside of a compiled layer."""
    torch._dynamo.reset()
    runner = run_on(tiny(architecture)[1], page_size=1, **OPTIONS)
    runner.compile(backend="aot_eager")
    made, cuts = counters["stats"]["unique_graphs"], Cuts()
    runner.capture_pieces(sizes=(8, 16), devices=cuts)
    assert counters["stats"]["unique_graphs"] == made
    layers = len(runner.context.layers)
    assert cuts.notes == ["begin", "end"] * 2 * (layers + 1)
    captured = runner.pieces.runner._captured[8]
    for call in captured.calls:
        q, *_, out = call.tensors
        assert q.shape[0] == out.shape[0] == 8
        assert q.data_ptr() != out.data_ptr()
    torch._dynamo.reset()


def test_a_longer_step_than_the_largest_size_runs_eagerly(tiny, run_on):
    runner = run_on(tiny("llama")[1], **OPTIONS)
    plain = generated(runner)
    steps = in_pieces(runner, sizes=(4, 8))
    assert generated(runner) == plain
    assert max(count for _, count in steps.in_pieces) <= 8
    assert min(steps.eager) > 8


def logits_of(runner, lens, tokens=()):
    """The logits of prompts of so many tokens in one step."""
    generator = torch.Generator().manual_seed(sum(lens))
    ids = [torch.randint(97, (n,), generator=generator).tolist() for n in lens]
    states = [SequenceState(token_ids=[*one, *tokens]) for one in ids]
    logits = runner.extend(states).clone()
    runner.release(states)
    return logits


def test_padded_tokens_do_not_matter(tiny, run_on):
    """Steps of other numbers of tokens, and of requests, one after another."""
    runner = run_on(tiny("gemma2")[1], **OPTIONS)
    lens = [(16,), (3, 9), (1,), (5, 4, 3, 2), (15,), (8, 8), (2,)]
    eager = [logits_of(runner, each) for each in lens]
    steps = in_pieces(runner, sizes=(16,))
    for each, expected in zip(lens, eager, strict=True):
        torch.testing.assert_close(logits_of(runner, each), expected, atol=1e-4, rtol=1e-4)
    assert len(steps.in_pieces) == len(lens)


def test_the_pool_holds_the_same_keys(tiny, run_on):
    """K and V of padded tokens are not written, not even to the slot of padding."""
    pools = []
    for runs_in_pieces in (False, True):
        runner = run_on(tiny("llama")[1], **OPTIONS)
        if runs_in_pieces:
            in_pieces(runner, sizes=(16,))
        logits_of(runner, (11,))
        pool = runner.context.token_to_kv_pool
        pools.append([pool.get_key_buffer(layer).clone() for layer in range(3)])
    for ours, theirs in zip(*pools, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_hidden_states_of_tokens_are_kept(tiny, run_on):
    kept = []
    for runs_in_pieces in (False, True):
        runner = run_on(tiny("llama")[1], hidden_states=True, **OPTIONS)
        if runs_in_pieces:
            in_pieces(runner, sizes=(16,))
        logits_of(runner, (11,))
        kept.append(runner.steps.hidden.states[1:].clone())
    torch.testing.assert_close(*kept, atol=1e-4, rtol=1e-4)


def test_bits_of_a_deterministic_runner_stay(tiny, run_on):
    runner = run_on(tiny("llama")[1], deterministic=True, **OPTIONS)
    eager = logits_of(runner, (11,))
    steps = in_pieces(runner, sizes=(16,))
    assert torch.equal(logits_of(runner, (11,)), eager)
    assert steps.in_pieces


def test_a_size_is_captured_once_enough_steps_had_it(tiny, run_on, monkeypatch):
    monkeypatch.setattr(pieces, "CAPTURED_AT", 2)
    monkeypatch.setattr("attnmux.transformers.options.PIECE_SIZES", (4, 8, 16, 32))
    runner = run_on(tiny("llama")[1], max_context_len=6, **OPTIONS)
    assert usual_pieces(24) == usual_pieces(32) == usual_pieces(99) == (4, 8, 16, 32)
    assert usual_pieces(8) == (4, 8)
    runner.capture_pieces(devices=RecordingGraphs())
    captured = runner.pieces.runner.memory_bytes
    assert captured.keys() == {32}  # a step has up to 24 tokens
    assert captured[32] > 0
    steps = Steps(runner)
    for _ in range(3):
        logits_of(runner, (5,))
    assert steps.eager[0] == 5
    assert steps.in_pieces == [("EXTEND", 5)] * 2
    assert runner.pieces.runner.memory_bytes.keys() == {8, 32}
    assert tuple(sorted(set(PIECE_SIZES))) == PIECE_SIZES


def test_a_size_that_cannot_be_captured_later_runs_eagerly(tiny, run_on, monkeypatch, caplog):
    monkeypatch.setattr(pieces, "CAPTURED_AT", 2)
    runner = run_on(tiny("llama")[1], max_context_len=6, **OPTIONS)
    runner.capture_pieces(devices=RecordingGraphs())
    eager = logits_of(runner, (5,))

    def fail(size):
        raise GraphUnsupported("no memory is left for graphs")

    monkeypatch.setattr(runner.pieces.runner, "capture", fail)
    for _ in range(3):
        torch.testing.assert_close(logits_of(runner, (5,)), eager)
    assert [record.getMessage() for record in caplog.records] == [
        "steps of up to 16 prompt tokens run eagerly: no memory is left for graphs"
    ]


def refused(runner):
    with pytest.raises(GraphUnsupported) as refusal:
        runner.capture_pieces(devices=RecordingGraphs())
    assert runner.pieces is None
    return str(refusal.value)


def test_refusals_have_a_reason(tiny, run_on, run_hybrid, monkeypatch):
    hybrid = run_hybrid(tiny("qwen3.5")[1], **OPTIONS)
    assert "linear layers" in refused(hybrid)
    runner = run_on(tiny("llama")[1], **{**OPTIONS, "debug": True})
    assert "debug mode" in refused(runner)
    runner = run_on(tiny("llama")[1], **OPTIONS)
    monkeypatch.setattr(runner.ranks, "size", 2)
    assert "2 ranks" in refused(runner)


def test_a_model_that_reads_on_the_host_is_refused(tiny, run_on):
    """Its steps are eager, as before."""
    runner = run_on(tiny("llama")[1], **OPTIONS)
    expected = logits_of(runner, (5,))
    layer = runner.model.model.layers[1]
    hook = layer.register_forward_pre_hook(lambda module, args: bool(args[0].sum() > 0) or None)
    assert "synchronises" in refused(runner)
    hook.remove()
    torch.testing.assert_close(logits_of(runner, (5,)), expected)


def test_options(tiny, run_on):
    with pytest.raises(InvalidInput, match="piece_sizes: expected ascending"):
        RunnerOptions(max_batch_size=1, max_context_len=9, piece_sizes=(4, 2))
    with pytest.raises(GraphUnsupported, match="graphs for 'cpu' devices"):
        run_on(tiny("llama")[1], **{**OPTIONS, "graph": None}, piece_sizes=(4,))
    for changes in ({"graph": None}, {"piece_sizes": (4,)}):
        assert run_on(tiny("llama")[1], **{**OPTIONS, **changes}).pieces is None


def test_a_share_of_the_memory_leaves_room(tiny, run_on, monkeypatch):
    """For the activations of the largest size; a number of bytes is taken whole."""
    monkeypatch.setattr("attnmux.core.KVPool.free_memory", lambda device: 1_000_000)
    runner = run_on(tiny("llama")[1], **OPTIONS)
    decision = runner.decision
    assert not decision.request.graph
    widest = (4 + 2 + 2) * 8 + 32 + 2 * 48 + 32
    captured = replace(decision, request=decision.request.replace(graph=True))
    tokens = []
    for sizes in ((), (24,)):
        for memory in (MemoryBudget(fraction=0.5), MemoryBudget(nbytes=500_000)):
            options = RunnerOptions(
                max_batch_size=4, max_context_len=64, memory=memory, piece_sizes=sizes
            )
            tokens.append(allocate(runner.served, captured, options).kv_tokens)
            eager = allocate(runner.served, decision, options).kv_tokens
            assert eager == tokens[0]
    share, exact, less, same = tokens
    assert share == exact == same
    per_token = 500_000 / share
    assert share - less == pytest.approx(2 * 24 * widest * 4 / per_token, abs=2)


@pytest.mark.parametrize(
    ("changes", "tokens"),
    [
        ({}, 256),
        ({"piece_sizes": (8, 16)}, 16),
        ({"piece_sizes": ()}, 0),
        ({"graph": False}, 0),
    ],
)
def test_room_is_left_for_the_largest_size(changes, tokens):
    options = RunnerOptions(max_batch_size=4, max_context_len=64, max_total_tokens=9, **changes)
    assert options.piece_tokens == tokens


def test_pieces_are_made_when_a_model_is_loaded(tiny, run_on, monkeypatch):
    monkeypatch.setattr(DeviceGraphs, "of", lambda device: RecordingGraphs())
    folder, changes = tiny("llama")[1], {**OPTIONS, "graph": None}
    runner = run_on(folder, piece_sizes=(8, 16), **changes)
    assert runner.pieces.runner.memory_bytes.keys() == {8, 16}
    runner = run_on(folder, max_context_len=16, **changes)
    assert runner.pieces.runner.sizes == (16, 32, 48, 64)
    assert runner.pieces.runner.memory_bytes.keys() == {64}
    assert run_on(folder, piece_sizes=(), **changes).pieces is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("compiles", [False, True])
def test_pieces_on_a_device(tiny, compiles):
    chooser = Chooser.here(torch.device("cuda"))
    runner = load_runner(
        open_checkpoint(tiny("llama")[1]),
        chooser.platform,
        Plugins.load().offers(),
        RunnerOptions(
            max_batch_size=4,
            max_context_len=64,
            max_total_tokens=256,
            compile=compiles,
            graph=False,
        ),
    )
    lens = [(16,), (3, 9), (1,), (5, 4, 3, 2), (15,), (8, 16), (2,), (24,)]
    eager = [logits_of(runner, each) for each in lens]
    plain = generated(runner)
    runner.capture_pieces(sizes=(8, 16, 24))
    assert sum(runner.pieces.runner.memory_bytes.values()) > 0
    steps = Steps(runner)
    for _ in range(2):
        for each, expected in zip(lens, eager, strict=True):
            torch.testing.assert_close(logits_of(runner, each), expected, atol=1e-3, rtol=1e-3)
    assert not steps.eager
    assert generated(runner) == plain
