"""A deterministic runner: a request's bits do not depend on the other requests of its steps."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from attnmux.core import InvalidInput, Offer, Plugins
from attnmux.testing import find_candidate
from attnmux.transformers import Engine
from attnmux.transformers.load.checkpoint import open_checkpoint, quiet_transformers
from attnmux.transformers.load.load_runner import load_runner
from attnmux.transformers.options import RunnerOptions
from attnmux.transformers.requests.sampling_params import SamplingParams

NEW = 9
CHUNK = 8
"""Prompt tokens of a step: longer prompts run in parts."""
MODELS = ("llama", "qwen3", "gemma2", "gpt2", "deepseek-v3", "gpt-oss")


class Recorded:
    """An engine that keeps the logits that each request's tokens were chosen by."""

    def __init__(self, runner, chunk=CHUNK) -> None:
        self.engine = Engine(runner, prefill_tokens=chunk)
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


def alone(runner, ids, chunk=CHUNK) -> torch.Tensor:
    recorded = Recorded(runner, chunk)
    request = recorded.add(ids)
    recorded.run()
    return recorded.of(request)


def in_company(runner, asked, chunk=CHUNK) -> list[torch.Tensor]:
    """All at once, then a long prompt while they decode."""
    recorded = Recorded(runner, chunk)
    requests = [recorded.add(ids) for ids in asked]
    while not all(request in recorded.rows for request in requests):
        recorded.engine.step()
    recorded.add(asked[0] * 3)
    recorded.run()
    assert recorded.kinds == {"extend", "decode"}
    return [recorded.of(request) for request in requests]


def check_bits(runner, count=4, longest=13, chunk=CHUNK) -> None:
    asked = prompts(count, longest)
    together = in_company(runner, asked, chunk)
    for ids, rows in zip(asked, together, strict=True):
        assert torch.equal(alone(runner, ids, chunk), rows)


GIVEN = {"max_batch_size": 5, "max_total_tokens": 512, "debug": False}


@pytest.mark.parametrize(
    ("name", "backend"),
    [*((name, "torch_native") for name in MODELS), ("llama", "native"), ("gemma2", "native")],
)
def test_bits_are_the_same_alone_in_a_batch_and_beside_a_long_prompt(
    tiny, run_on, name, backend
) -> None:
    check_bits(run_on(tiny(name)[1], backend, **GIVEN, deterministic=True))


@pytest.mark.turns(2, suite="interpreted kernels")
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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("graph", [True, False])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("backend", ["triton", "fa3"])
def test_bits_on_a_gpu_are_the_same(tmp_path, backend, head_dim, graph) -> None:
    """Prompts of several key blocks, in parts of one, and decode steps from device graphs."""
    shape = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": head_dim}
    config = LlamaConfig(vocab_size=97, hidden_size=256, num_hidden_layers=3, **shape)
    with quiet_transformers(progress=False):
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    candidate = find_candidate(backend, device="cuda")
    offers = [offer for offer in Plugins.load().offers() if offer.card.name == backend]
    options = RunnerOptions(
        **{**GIVEN, "max_total_tokens": 8192},
        **{"max_context_len": 2048, "deterministic": True, "device": "cuda", "dtype": "bfloat16"},
        graph=graph,
    )
    runner = load_runner(open_checkpoint(tmp_path), candidate.platform, offers, options)
    check_bits(runner, longest=600, chunk=128)


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
