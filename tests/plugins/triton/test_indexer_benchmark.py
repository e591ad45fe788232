"""The benchmark of an indexer's picks runs in small, and says where they are wrong."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.indexer")


def test_every_step_is_checked_and_timed(benchmark, tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    given = ["--device", "cpu", "--rounds", "1", "--json", str(path)]
    result = CliRunner().invoke(benchmark.main, given, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    found = {(row["step"], row["keys"]) for row in rows}
    steps = ("decode 1", "decode 3", "prompt 9")
    assert found == {(step, keys) for step in steps for keys in ("bfloat16", "float8_e4m3fn")}
    assert all(row["disorder"] <= 1e-3 for row in rows)
    assert "WRONG" not in result.output


@pytest.mark.parametrize("requests", [0, 3])
def test_wrong_picks_are_seen(benchmark, requests: int) -> None:
    step = benchmark.make_step(benchmark.SMALL, 192, torch.bfloat16, requests, torch.device("cpu"))
    step.run(step.torch_picker)()
    assert benchmark.disorder(step) <= 1e-3
    picks = step.batch.topk_indices
    picks[-1, :] = torch.arange(picks.shape[1])
    assert benchmark.disorder(step) > 1e-2
    picks[-1, 0] = picks[-1, 1]
    assert benchmark.disorder(step) == float("inf")
