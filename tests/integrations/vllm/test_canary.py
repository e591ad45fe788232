"""The canary in vLLM: a planted fault is found in a served model, and correct models raise none."""

from __future__ import annotations

import importlib
import logging
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

vllm = pytest.importorskip("vllm")
native = pytest.importorskip("attnmux.cpu.torch_native")
verbs = pytest.importorskip("attnmux.core.cli.verbs")
prometheus = pytest.importorskip("prometheus_client")

# vLLM and its dependencies warn of themselves
pytestmark = pytest.mark.filterwarnings("ignore")


class Lines(logging.Handler):
    """Keeps the records that it gets."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture
def said(monkeypatch):
    """The lines of a level. vLLM's own loggers are set up again when an engine starts."""
    logger, lines = logging.Logger("canary", logging.INFO), Lines()
    logger.addHandler(lines)
    monkeypatch.setattr("attnmux.vllm.group.logger", logger)
    return lambda level: [each.getMessage() for each in lines.records if each.levelno == level]


def counted(name: str, **labels: str) -> float:
    return prometheus.REGISTRY.get_sample_value(f"attnmux_canary_{name}_total", labels) or 0.0


def texts(model: Path, prompts: Sequence[Any], **engine: Any) -> list[list[int]]:
    theirs = importlib.import_module("tests.integrations.vllm.test_engine")
    return theirs.texts(model, "ATTNMUX", prompts, **engine)


@pytest.mark.turns(2)
@pytest.mark.parametrize(
    ("family", "engine"),
    [
        ("mixed_windows", {"max_num_batched_tokens": 48}),
        ("mla", {}),
        ("sinks", {"enforce_eager": False}),
        ("chunks", {"block_size": 32}),
        ("gqa", {"kv_cache_dtype": "fp8"}),
    ],
)
def test_no_alarm(family, engine, checkpoint, prompts, monkeypatch, said):
    own = texts(checkpoint(family), prompts, **engine)
    monkeypatch.setenv("ATTNMUX_CANARY", "1")
    before = counted("checks")
    assert texts(checkpoint(family), prompts, **engine) == own
    lines = [each for each in said(logging.INFO) if each.startswith("canary: ")]
    assert counted("checks") - before == len(lines) > 20
    # Prompts of MLA, which may run with expanded heads, are not checked
    modes = {"DECODE"} if family == "mla" else {"DECODE", "MIXED"}
    assert {each.split(", ")[2] for each in lines} == modes
    assert "model.layers." in lines[0]
    assert not said(logging.WARNING) + said(logging.ERROR)


def test_a_backend_that_is_wrong_for_8_queries_in_a_window(checkpoint, monkeypatch, said, tmp_path):
    right = native.TorchNativeBackend.forward_extend

    def wrong(self: Any, call: Any, batch: Any) -> Any:
        out, first = right(self, call, batch), 0
        for new in batch.extend_seq_lens.tolist():
            if new == 8 and call.layer.sliding_window_size >= 0:
                out[first : first + 8] *= 1.01
            first += new
        return out

    rng = random.Random(0)
    prompts = [[rng.randrange(256) for _ in range(rng.choice((5, 8)))] for _ in range(60)]
    monkeypatch.setenv("ATTNMUX_BACKEND", "torch_native")
    monkeypatch.setenv("ATTNMUX_CANARY", "5")
    monkeypatch.setenv("ATTNMUX_CANARY_FAILURES", str(tmp_path))
    monkeypatch.setenv("ATTNMUX_CANARY_VALUES", "1")
    before = counted("findings", check="output")
    with monkeypatch.context() as fault:
        fault.setattr(native.TorchNativeBackend, "forward_extend", wrong)
        texts(checkpoint("mixed_windows"), prompts)
    errors = said(logging.ERROR)
    assert counted("findings", check="output") - before == len(errors) > 0
    assert all("8 of 8 new tokens after 0" in each for each in errors)
    kept = next(tmp_path.iterdir())
    for backend in ("torch_native", "native"):
        result = CliRunner().invoke(verbs.verbs, ["replay", str(kept), "--backend", backend])
        assert f"{backend}, the kept values: agrees" in result.output, result.output


def test_without_the_extra_the_start_says_what_to_install(checkpoint, monkeypatch):
    monkeypatch.setenv("ATTNMUX_CANARY", "1000")
    monkeypatch.setitem(importlib.import_module("sys").modules, "attnmux.testing", None)
    with pytest.raises(ValueError, match=r'pip install "attnmux-vllm\[canary\]"'):
        texts(checkpoint("gqa"), [])
