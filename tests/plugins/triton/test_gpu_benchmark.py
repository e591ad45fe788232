"""The benchmark against the libraries runs on a CPU, with emulated libraries."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

ROOT = Path(__file__).parents[3]

PEERS = {
    "decode": {"flashinfer", "fa3"},
    "fp8": {"our bf16", "flashinfer"},
    "turns": {"flashinfer", "fa3"},
    "turns fp8": {"our bf16"},
    "mla": {"flashinfer", "fa3"},
    "extend": {"flashinfer", "flashinfer fa2", "fa3"},
}


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.triton_gpu")


@pytest.mark.parametrize("family", PEERS)
def test_a_family_is_compared(benchmark, family: str, tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    given = ["--dry-run", "--rounds", "1", "--only", family, "--json", str(path)]
    result = CliRunner().invoke(benchmark.main, given, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    # Nothing emulates it
    assert "missing: flashmla: ModuleNotFoundError" in result.output
    assert f"{family}: geometric mean" in result.output
    found = json.loads(path.read_text(encoding="utf-8"))
    (row,) = found["rows"]
    timed = {name for name, figure in row["figures"].items() if figure["us"] is not None}
    assert timed == {"ours"} | PEERS[family]
    assert all(row["figures"][name]["error"] < 2e-3 for name in timed)
    assert set(found["versions"]) >= {"torch", "triton", "flashinfer-python", "sglang-kernel"}


def test_a_wrong_answer_is_reported_and_not_timed(benchmark) -> None:
    measuring = benchmark.Benchmark(rounds=1, ours_only=True, dry_run=True)
    step = benchmark.TINY["decode"][0].step(measuring.device)
    found = benchmark.admitted(lambda: [lambda: step.q], step, None, alone=False)
    assert found.run is None
    assert found.figure.error > 0.1
    assert found.figure.cell == "WRONG"

    def fails() -> None:
        raise RuntimeError("no kernel image")

    found = benchmark.admitted(lambda: [fails], step, None, alone=False)
    assert found.run is None
    assert found.figure.cell == "failed"
    assert "no kernel image" in found.figure.failure


def test_whole_outputs_are_compared(benchmark) -> None:
    """Also where the sampled queries are right."""
    measuring = benchmark.Benchmark(rounds=1, ours_only=True, dry_run=True)
    step = benchmark.TINY["decode"][0].step(measuring.device)
    whole = benchmark.admitted(lambda: measuring.ours(step), step, None, alone=False).out
    assert whole is not None
    found = benchmark.admitted(lambda: measuring.ours(step), step, 2 * whole, alone=False)
    assert (found.run, found.figure.cell) == (None, "WRONG")


def test_products_of_eight_bits_are_compared(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    module = importlib.import_module("benchmarks.eight_bit_products")
    path = tmp_path / "figures.json"
    given = ["--dry-run", "--rounds", "1", "--seed", "1", "--json", str(path)]
    result = CliRunner().invoke(module.main, given, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    tiny, window, step = json.loads(path.read_text(encoding="utf-8"))["rows"]
    for row in (tiny, step):
        assert row["16 bits"]["error"] < 1e-2
        assert all(1e-2 < row[side]["error"] < 7e-2 for side in ("queries", "all", "fa3"))
    assert window["16 bits"]["error"] == window["queries"]["error"] == window["all"]["error"]
    assert all(step[side]["us"] > 0 for side in ("16 bits", "queries", "all", "fa3", "fa3 alone"))


def test_wrong_products_of_eight_bits_are_reported(monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    table = importlib.import_module("benchmarks.eight_bit_cases")

    def verdict(exact: float, rounded: float, *, has_products: bool = True) -> str:
        figures = {"16 bits": table.Figure(error=exact), "all": table.Figure(error=rounded)}
        return table.faults(figures, has_products=has_products)

    assert verdict(3e-3, 3e-2) == "right"
    assert verdict(2e-2, 6.5e-2) == "16 bits WRONG by 0.02"
    assert verdict(3e-3, float("nan")) == "all WRONG by nan"
    assert verdict(3e-3, 3e-3) == "all NOT ROUNDED"
    assert verdict(3e-3, 3e-2, has_products=False) == "all WRONG by 0.03"
    assert verdict(3e-3, 3e-3, has_products=False) == "right"
