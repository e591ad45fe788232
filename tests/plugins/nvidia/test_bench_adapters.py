"""The benchmark of adapters goes through on a CPU, with what emulates the libraries."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from attnmux.core.errors import BackendFailed

ROOT = Path(__file__).parents[3]
WAYS = {
    "fa3": {"same calls"},
    "flashinfer": {"same calls", "one call"},
    "trtllm_mha": {"same calls", "kernel alone"},
    "fa4": {"same calls"},
    "fa3_mla": {"same calls"},
    "flashinfer_mla": {"same calls"},
    "flashmla": {"same calls", "kernel alone"},
    "nsa": {"same calls", "kernel alone"},
}


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.adapters")


@pytest.fixture
def measuring(benchmark) -> Any:
    return importlib.import_module("benchmarks.adapter_measuring")


def test_every_backend_is_asked(benchmark) -> None:
    assert benchmark.ADAPTERS.keys() == WAYS.keys()


@pytest.mark.parametrize("name", WAYS)
def test_a_backend_is_compared_with_its_library(benchmark, name, tmp_path) -> None:
    path = tmp_path / "figures.json"
    given = ["--dry-run", "--rounds", "1", "--backend", name, "--json", str(path)]
    result = CliRunner().invoke(benchmark.main, given, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    assert [row["failure"] for row in rows] == [""] * len(rows)
    assert {row["raw"] for row in rows} == WAYS[name]
    assert {row["workload"] for row in rows} == set(map(str, benchmark.ADAPTERS[name].tiny))
    for row in rows:
        assert all(row[figure] is not None for figure in benchmark.FIGURES)
        assert row["graph_raw"] > 0
        assert row["host_ours"] > 0


def measured(benchmark, name: str, **changes: Any) -> list[Any]:
    adapter = replace(benchmark.ADAPTERS[name], **changes)
    device = torch.device("cpu")
    return benchmark.measure(name, adapter, adapter.tiny[0], 1, device)


def test_a_library_that_is_missing_is_a_row_that_says_so(benchmark) -> None:
    def missing() -> Any:
        raise ModuleNotFoundError("No module named 'sgl_kernel'")

    (row,) = measured(benchmark, "fa3_mla", emulated=missing)
    assert "sgl_kernel" in row.failure
    assert row.bars == "MISSED"
    assert "sgl_kernel" in benchmark.line(row, has_bars=True)


def test_answers_that_differ_are_not_timed(benchmark) -> None:
    adapter = benchmark.ADAPTERS["flashmla"]

    def wrong(kernels, setup) -> Any:
        return {
            way: [lambda call=call: call()[0] * 1.5 for call in calls]
            for way, calls in adapter.ways(kernels, setup).items()
        }

    (row,) = measured(benchmark, "flashmla", ways=wrong)
    assert "not close" in row.failure
    assert row.host_raw is None


def test_what_cannot_be_captured_has_figures_of_the_host(benchmark, measuring, monkeypatch) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(measuring, "graph_times", fails)
    (row,) = measured(benchmark, "fa4")
    assert "in a graph: RuntimeError" in row.failure
    assert row.host_added is not None
    assert row.graph_ratio is None
    assert row.bars == "MISSED"


@pytest.mark.parametrize(
    ("raw", "ratio", "added", "bars"),
    [
        ("same calls", 1.02, 15.0, "kept"),
        ("same calls", 1.03, 1.0, "MISSED"),
        ("kernel alone", 1.0, 16.0, "MISSED"),
        ("one call", 2.0, 99.0, "-"),
    ],
)
def test_bars(benchmark, raw, ratio, added, bars) -> None:
    row = benchmark.Row(backend="fa3", workload="", raw=raw, graph_ratio=ratio, host_added=added)
    assert row.bars == bars


def test_a_package_that_fails_makes_room_for_the_next(benchmark, monkeypatch) -> None:
    module = importlib.import_module("benchmarks.adapter_flash_mla")

    def trial(kernels: Any, context: Any) -> None:
        if kernels == "first":
            raise BackendFailed("nvidia/flashmla", "no kernel image")

    monkeypatch.setattr("attnmux.nvidia.trial.import_module", lambda name: name)
    providers = {"first": lambda found: found, "second": lambda found: found}
    assert module._first("nvidia/flashmla", providers, trial)(None) == "second"
    with pytest.raises(BackendFailed, match=r"nvidia/flashmla .* first: no kernel image"):
        module._first("nvidia/flashmla", {"first": lambda found: found}, trial)(None)
