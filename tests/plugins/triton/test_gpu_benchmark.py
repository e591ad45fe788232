"""The benchmark against the libraries runs on a CPU, with emulators of the libraries."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

ROOT = Path(__file__).parents[3]

PEERS = {
    "decode": {"flashinfer", "fa3"},
    "fp8": {"our bf16", "flashinfer"},
    "mla": {"flashinfer", "fa3"},
    "extend": {"flashinfer", "flashinfer fa2", "fa3"},
}


@pytest.mark.parametrize("family", PEERS)
def test_a_family_is_compared(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    benchmark = importlib.import_module("benchmarks.triton_gpu")
    path = tmp_path / "figures.json"
    given = ["--dry-run", "--rounds", "1", "--only", family, "--json", str(path)]
    result = CliRunner().invoke(benchmark.main, given, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "missing: flashmla: ImportError" in result.output
    found = json.loads(path.read_text(encoding="utf-8"))
    (row,) = found["rows"]
    timed = {name for name, figure in row["figures"].items() if figure["us"] is not None}
    assert timed == {"ours"} | PEERS[family]
    assert all(row["figures"][name]["error"] < 2e-3 for name in timed)
    assert set(found["versions"]) >= {"torch", "triton", "flashinfer-python", "sglang-kernel"}


def test_what_answers_wrongly_is_neither_timed_nor_hidden(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    sides = importlib.import_module("benchmarks.triton_sides")
    workloads = importlib.import_module("benchmarks.triton_workloads")
    measured = importlib.import_module("benchmarks.triton_gpu")
    benchmark = measured.Benchmark(rounds=1, ours_only=True, dry_run=True)
    setups = importlib.import_module("benchmarks.triton_setups")
    setup = setups.make_setup(workloads.TINY[0], benchmark.platform, benchmark.device)
    run, figure = sides.admitted(lambda: [lambda: setup.q], setup, None)
    assert run is None
    assert figure.error > 0.1
    assert figure.cell == "WRONG"

    def fails() -> None:
        raise RuntimeError("no kernel image")

    run, figure = sides.admitted(lambda: [fails], setup, None)
    assert run is None
    assert figure.cell == "failed"
    assert "no kernel image" in figure.failure
