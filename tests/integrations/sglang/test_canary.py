"""The canary in SGLang: a planted fault is found in a served model; correct models raise none."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

pytest.importorskip("sglang")
native = pytest.importorskip("attnmux.cpu.torch_native")
verbs = pytest.importorskip("attnmux.core.cli.verbs")
texts = pytest.importorskip("tests.integrations.sglang.test_texts")


def _lines(log: str, word: str = "") -> list[str]:
    return [each for each in log.splitlines() if "canary: step" in each and word in each]


@pytest.mark.turns(2)
@pytest.mark.parametrize("family", ["mixed windows", "mla", "sinks"])
def test_no_alarm(
    family: str, run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts.save(family, tmp_path / "model")
    asked = texts._prompts(97), texts.NUM_TOKENS
    (own,), _ = run(tmp_path / "model", "attnmux", [asked])
    monkeypatch.setenv("ATTNMUX_CANARY", "1")
    (got,), log = run(tmp_path / "model", "attnmux", [asked])
    assert got == own
    checks = _lines(log)
    assert len(checks) > 20
    assert all("its own queries: largest error" in each for each in checks)
    assert not _lines(log, "canary, step")
    for mode in ("EXTEND", "DECODE"):
        assert _lines(log, mode)


def test_a_backend_that_is_wrong_for_8_queries_in_a_window(
    run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = native.TorchNativeBackend.forward_extend

    def wrong(self: Any, call: Any, batch: Any) -> Any:
        out, first = right(self, call, batch), 0
        for new in batch.extend_seq_lens.tolist():
            if new == 8 and call.layer.sliding_window_size >= 0:
                out[first : first + 8] *= 1.01
            first += new
        return out

    texts.save("mixed windows", tmp_path / "model")
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 97) for _ in range(rng.choice((5, 8)))] for _ in range(40)]
    for name, value in (("", "5"), ("_FAILURES", str(tmp_path / "kept")), ("_VALUES", "1")):
        monkeypatch.setenv(f"ATTNMUX_CANARY{name}", value)
    monkeypatch.setenv("ATTNMUX_BACKEND", "torch_native")
    with monkeypatch.context() as fault:  # the engine is a fork of this process
        fault.setattr(native.TorchNativeBackend, "forward_extend", wrong)
        _, log = run(tmp_path / "model", "attnmux", [(prompts, [3] * 40)])
    errors = _lines(log, "attnmux replay")
    assert errors
    assert all("8 of 8 new tokens after 0" in each for each in errors)
    kept = next((tmp_path / "kept").iterdir())
    for backend in ("torch_native", "native"):
        result = CliRunner().invoke(verbs.verbs, ["replay", str(kept), "--backend", backend])
        assert f"{backend}, the kept values: agrees" in result.output, result.output
