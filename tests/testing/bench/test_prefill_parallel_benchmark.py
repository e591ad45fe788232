"""The benchmark of prompts that several ranks compute, on processes of this machine."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

from attnmux.distributed import RankGroup
from attnmux.emulators.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("others", "expected"),
    [([], 0), ([(0, 100)], 30), ([(15, 25), (12, 18), (55, 90)], 23), ([(20, 50)], 0)],
)
def test_how_much_of_the_communication_is_covered(others, expected, monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    covered = importlib.import_module("benchmarks.prefill_parallel").covered
    assert covered([(10, 20), (50, 70)], others) == pytest.approx(expected)


def measured(group: RankGroup, options: list[str]) -> None:
    sys.path.insert(0, str(ROOT))
    benchmark = importlib.import_module("benchmarks.prefill_parallel")
    benchmark.main(options, standalone_mode=False)


def test_ranks_are_compared_with_one_alone(tmp_path: Path) -> None:
    figures, trace = tmp_path / "figures.json", tmp_path / "trace.json"
    options = ["--backend=torch_native", "--tokens=90", "--layers=2", "--rounds=1"]
    run_ranks(measured, 2, tmp_path, [*options, f"--json={figures}", f"--profile={trace}"])
    rows = json.loads(figures.read_text())["rows"]
    assert [row["layers"] for row in rows] == [1, 2]
    for row in rows:
        assert row["speedup"] > 0
        assert 0 <= row["hidden"] <= 1
        assert row["error"] < 0.02
    assert "gloo:send" in trace.read_text()
