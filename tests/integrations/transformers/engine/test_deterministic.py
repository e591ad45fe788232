"""A deterministic runner: a request's bits do not depend on the other requests of its steps."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from attnmux.core import InvalidInput, Offer
from attnmux.transformers import Engine
from attnmux.transformers.load.checkpoint import open_checkpoint
from attnmux.transformers.load.load_runner import load_runner
from attnmux.transformers.load.options import RunnerOptions
from attnmux.transformers.requests.sampling_params import SamplingParams

NEW = 9
CHUNK = 8
"""Prompt tokens of a step: longer prompts run in parts."""
MODELS = ("llama", "qwen3", "gemma2", "gpt2", "deepseek-v3", "gpt-oss")


class Recorded:
    """An engine that keeps the logits that each request's tokens were chosen by."""

    def __init__(self, runner) -> None:
        self.engine = Engine(runner, prefill_tokens=CHUNK)
        self.rows: dict[int, list[torch.Tensor]] = {}
        self.kinds = set()
        launch, forward = self.engine._execution.launch, type(runner).forward

        def launched(plan, laps, *, ahead=False):
            self.plan = plan
            return launch(plan, laps, ahead=ahead)

        def recorded(step, indices, laps=None):
            logits = forward(runner, step, indices, laps)
            self.kinds.add(self.plan.kind)
            for request, row in zip(self.plan.requests, logits, strict=True):
                if request in self.plan.sampled:
                    self.rows.setdefault(request.id, []).append(row.clone())
            return logits

        self.engine._execution.launch = launched
        runner.forward = recorded

    def add(self, ids):
        return self.engine.add(ids, max_new_tokens=NEW, sampling=SAMPLING, stop_ids=())

    def run(self) -> None:
        while self.engine.has_work:
            self.engine.step()

    def of(self, request: int) -> torch.Tensor:
        return torch.stack(self.rows[request])


SAMPLING = SamplingParams(temperature=0.7, top_p=0.9, seed=5)


def prompts(count, longest=13):
    rng = random.Random(3)
    return [[rng.randrange(1, 97) for _ in range(rng.randint(2, longest))] for _ in range(count)]


def alone(runner, ids) -> torch.Tensor:
    recorded = Recorded(runner)
    request = recorded.add(ids)
    recorded.run()
    return recorded.of(request)


def in_company(runner, asked) -> list[torch.Tensor]:
    """All at once, then a long prompt while they decode."""
    recorded = Recorded(runner)
    requests = [recorded.add(ids) for ids in asked]
    for _ in range(7):
        recorded.engine.step()
    recorded.add(prompts(1)[0] * 4)
    recorded.run()
    assert recorded.kinds == {"extend", "decode"}
    return [recorded.of(request) for request in requests]


def check_bits(runner, count=4) -> None:
    asked = prompts(count)
    together = in_company(runner, asked)
    for ids, rows in zip(asked, together, strict=True):
        assert torch.equal(alone(runner, ids), rows)


GIVEN = {"max_batch_size": 5, "max_total_tokens": 512, "debug": False}


@pytest.mark.parametrize(
    ("name", "backend"),
    [*((name, "torch_native") for name in MODELS), ("llama", "native"), ("gemma2", "native")],
)
def test_bits_are_the_same_alone_in_a_batch_and_beside_a_long_prompt(
    tiny, run_on, name, backend
) -> None:
    check_bits(run_on(tiny(name)[1], backend, **GIVEN, deterministic=True))


def test_bits_of_triton_are_the_same(tiny, monkeypatch) -> None:
    pytest.importorskip("triton")
    from attnmux.emulators.candidates import emulated  # noqa: PLC0415  # where there is a Triton

    with emulated("triton") as candidate:
        module = ModuleType("interpreted_triton")
        module.make = candidate.factory
        monkeypatch.setitem(sys.modules, module.__name__, module)
        card = replace(candidate.card, factory="interpreted_triton:make")
        offers = [Offer(card=card, plugin="triton", distribution="attnmux-triton", version="1")]
        options = RunnerOptions(
            **GIVEN, max_context_len=64, deterministic=True, device="cpu", dtype="float16"
        )
        runner = load_runner(open_checkpoint(tiny("llama")[1]), candidate.platform, offers, options)
        check_bits(runner, count=3)


@pytest.mark.parametrize(
    "given",
    [
        {"draft_tokens": 4},
        {"compile": True},
        {"mla": "absorbed"},
        {"sparse": "quest", "sparse_budget": 64},
    ],
)
def test_what_depends_on_the_batch_is_refused(given) -> None:
    with pytest.raises(InvalidInput, match="deterministic"):
        RunnerOptions(max_batch_size=1, max_context_len=64, deterministic=True, **given)


def test_without_it_bits_differ(tiny, run_on) -> None:
    """Else the tests above show nothing."""
    runner = run_on(tiny("llama")[1], "torch_native", **GIVEN)
    asked = prompts(4)
    recorded = Recorded(runner)
    requests = [recorded.add(ids) for ids in asked]
    recorded.run()
    together = [recorded.of(request) for request in requests]
    runner.reset()
    pairs = zip(asked, together, strict=True)
    assert not all(torch.equal(alone(runner, ids), rows) for ids, rows in pairs)
