"""What is done while weights load: first cases, and the first steps of the decided backends."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from attnmux.core import BackendFailed, Decision, Plugins
from attnmux.core.find.cpu import probe_cpu
from attnmux.transformers import ModelRunner, RunnerOptions, load_runner, open_checkpoint
from attnmux.transformers.load import ahead, load_decoder

Tiny = Callable[[str], tuple[PreTrainedModel, Path]]


def load(folder: Path, **changes: Any) -> ModelRunner:
    options = RunnerOptions(max_batch_size=2, max_context_len=64, max_total_tokens=128, **changes)
    offers = [offer for offer in Plugins.load().offers() if offer.card.name == "torch_native"]
    return load_runner(open_checkpoint(folder), probe_cpu(), offers, options)


def test_steps_are_taken_while_weights_load_and_before_the_backend_is_made(
    monkeypatch: pytest.MonkeyPatch, tiny: Tiny
) -> None:
    noted: list[tuple[str, str]] = []
    loading, tried = threading.Event(), threading.Event()
    read, take = load_decoder.load_model, ahead.take_steps

    def load_model(*args: Any, **kwargs: Any) -> PreTrainedModel:
        loading.set()
        assert tried.wait(60)
        return read(*args, **kwargs)

    def take_steps(decision: Decision, options: RunnerOptions) -> None:
        assert loading.wait(60)
        tried.set()
        take(decision, options)
        noted.append(("steps", decision.hash))

    monkeypatch.setattr(load_decoder, "load_model", load_model)
    monkeypatch.setattr(ahead, "take_steps", take_steps)
    runner = load(tiny("llama")[1], check=lambda decision: noted.append(("check", decision.hash)))
    assert [name for name, _ in noted] == ["check", "steps", "check"]
    assert {decided for _, decided in noted} == {runner.decision.hash}


def test_what_fails_while_weights_load_fails_nothing(
    monkeypatch: pytest.MonkeyPatch, tiny: Tiny
) -> None:
    called: list[object] = []

    def fails(*_: object) -> None:
        called.append(_)
        raise BackendFailed("cpu/torch_native", "it does not compile")

    monkeypatch.setattr(ahead, "take_steps", fails)
    runner = load(tiny("llama")[1])
    assert len(called) == 1
    assert runner.decision.phases["decode"].backend == "torch_native"


def test_nothing_begins_without_a_decision() -> None:
    nothing = ahead.Ahead(None, RunnerOptions(max_batch_size=1, max_context_len=8))
    nothing.begin()
    nothing.join()
