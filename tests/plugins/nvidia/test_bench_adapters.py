"""The benchmark of adapters runs on a CPU, with emulated libraries."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

ROOT = Path(__file__).parents[3]
CPU = torch.device("cpu")
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
def emulated(benchmark) -> Iterator[None]:
    with benchmark.emulated_libraries():
        yield


def test_every_adapter_is_here(benchmark) -> None:
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
        assert row["workload"] in result.output


def test_the_emulated_libraries_are_gone_after_a_dry_run(benchmark) -> None:
    before = set(sys.modules)
    with benchmark.emulated_libraries():
        importlib.import_module("sgl_kernel.flash_attn")
        measured(benchmark, "fa3")
    left = {name for name in sys.modules if name.split(".")[0] in ("sgl_kernel", "flashinfer")}
    assert left <= before
    assert not any(
        name.startswith("attnmux.nvidia.fa3.backend") for name in set(sys.modules) - before
    )


def measured(benchmark, name: str, **changes: Any) -> list[Any]:
    adapter = replace(benchmark.ADAPTERS[name], **changes)
    return benchmark.measure(name, adapter, adapter.tiny[0], 1, CPU)


def test_a_missing_library_is_a_row(benchmark, emulated, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "sgl_kernel.flash_attn", None)
    (row,) = measured(benchmark, "fa3_mla")
    assert "sgl_kernel" in row.failure
    assert row.bars == "MISSED"


@pytest.mark.usefixtures("emulated")
def test_answers_that_differ_are_not_timed(benchmark) -> None:
    adapter = benchmark.ADAPTERS["flashmla"]

    def wrong(*given) -> Any:
        return {
            way: [lambda call=call: call()[0] * 1.5 for call in calls]
            for way, calls in adapter.ways(*given).items()
        }

    (row,) = measured(benchmark, "flashmla", ways=wrong)
    assert "not close" in row.failure
    assert row.host_raw is None


@pytest.mark.usefixtures("emulated")
def test_host_figures_without_a_graph(benchmark, monkeypatch) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(benchmark, "in_graph", fails)
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
    def ways(library: Any, step: Any) -> Any:
        if library == "first":
            raise RuntimeError("no kernel image")
        return {library: [lambda: None]}

    monkeypatch.setattr(benchmark, "import_module", lambda name: name)
    adapter = replace(benchmark.ADAPTERS["flashmla"], modules=("first", "second"), ways=ways)
    step = adapter.tiny[0].step(CPU)
    assert list(benchmark.call_by_hand(adapter, step)) == ["second"]
    with pytest.raises(RuntimeError, match=r"first: RuntimeError: no kernel image"):
        benchmark.call_by_hand(replace(adapter, modules=("first",)), step)
