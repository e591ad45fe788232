"""Prompts in pieces: attention runs between graphs, and texts are the same."""

from __future__ import annotations

import pytest
import torch

from attnmux.core import DeviceGraphs, GraphUnsupported, InvalidInput
from attnmux.testing import RecordingGraphs
from attnmux.transformers import Engine, SequenceState

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
