"""Sides that take turns, the figures of their rounds, and the table and file that show them."""

from __future__ import annotations

import gc
import importlib
import json
import subprocess
import sys
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from attnmux.core import GraphUnsupported, InvalidInput
from attnmux.core.plugin import CapturedGraph, GraphStep
from attnmux.testing import RecordingGraphs, bench
from attnmux.testing.bench import (
    Report,
    Times,
    device_meter,
    facts,
    host_meter,
    in_graph,
    in_turn,
    interleave,
    wall_meter,
)

ROOT = Path(__file__).parents[3]
CPU = torch.device("cpu")


def test_the_public_face_imports_no_torch() -> None:
    code = (
        "import sys; from attnmux.testing.bench import Workload; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_public_name_is_there() -> None:
    assert sorted(bench.__all__) == bench.__all__
    for name in bench.__all__:
        assert getattr(bench, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        bench.nothing  # noqa: B018


def test_sides_take_turns_there_and_back() -> None:
    order = []

    def meter(side, us):
        def measure() -> float:
            order.append(side)
            return us[len([each for each in order if each == side]) - 1]

        return measure

    meters = {"a": meter("a", [99.0, 2.0, 6.0, 4.0]), "b": meter("b", [99.0, 1.0, 2.0, 4.0])}
    times = interleave(meters, 3, warm_up=1)
    assert order == ["a", "b", "b", "a", "a", "b", "b", "a"]
    assert times.us == {"a": [2.0, 6.0, 4.0], "b": [1.0, 2.0, 4.0]}
    assert (times.median("a"), times.median("b")) == (4.0, 2.0)
    # Medians of the rounds' own, which are neither 4 / 2 nor 4 - 2
    assert times.ratio("a", "b") == 2.0
    assert Times(us={"a": [2.0, 9.0, 4.0], "b": [1.0, 3.0, 4.0]}).added("a", "b") == 1.0


def test_a_side_that_fails_is_left_out_where_that_is_allowed() -> None:
    def fails() -> float:
        raise RuntimeError("no kernel image\nand much more")

    times = interleave({"a": fails, "b": lambda: 1.0}, 2, keep_going=True)
    assert times.failures == {"a": "RuntimeError: no kernel image"}
    assert times.us["b"] == [1.0, 1.0]
    with pytest.raises(RuntimeError):
        interleave({"a": fails}, 1)


def test_meters_run_what_they_time() -> None:
    ran = []
    assert host_meter([lambda: ran.append("x"), lambda: ran.append("y")], CPU, count=3)() > 0
    assert ran == ["x", "y", "x"]
    assert wall_meter(in_turn([lambda: ran.append("z")] * 2), CPU, repeats=2)() > 0
    assert ran[3:] == ["z"] * 4
    assert device_meter(lambda: ran.append("d"), CPU, repeats=2)() > 0
    assert ran[7:] == ["d"] * 2


def test_a_run_is_replayed_from_a_graph() -> None:
    total, one = torch.zeros(1), torch.ones(1)
    replay = in_graph(lambda: total.add_(one), RecordingGraphs())
    total.zero_()
    one.fill_(3)
    replay()
    replay()
    assert total.item() == 6
    run = object
    assert in_graph(run, None) is run


def test_a_replay_keeps_the_memory_that_its_graph_reads() -> None:
    class Graphs(RecordingGraphs):
        def capture(self, step: GraphStep) -> CapturedGraph:
            # It has addresses and no tensors
            return CapturedGraph(outputs=step.run(), nbytes=0, replay=lambda: None)

    memory = torch.zeros(3)
    kept = weakref.ref(memory)
    replay = in_graph(partial(memory.add_, 1), Graphs())
    del memory
    gc.collect()
    replay()
    assert kept() is not None


def test_a_graph_that_waits_for_preparations_gets_one_before_each_replay() -> None:
    class Graphs(RecordingGraphs):
        def capture(self, step: GraphStep) -> CapturedGraph:
            return replace(super().capture(step), repeats=False)

    total, called = torch.zeros(1), []
    run = partial(total.add_, 1)
    replay = in_graph(run, Graphs(), renew=lambda: called.append(total.item()))
    total.zero_()
    replay()
    replay()
    assert called == [0, 1]
    with pytest.raises(GraphUnsupported, match="cannot run twice"):
        in_graph(run, Graphs())
    in_graph(run, RecordingGraphs(), renew=lambda: called.append(0))()
    assert called == [0, 1]


def test_a_report_is_a_table_and_a_file(tmp_path, capsys) -> None:
    path = tmp_path / "figures.json"
    about = facts(CPU, "attnmux-testing", "no-such-package", bars={"ratio": 1.0})
    columns = {"workload": "", "us": ".1f", "ratio": ".3f"}
    with Report(columns, about, path, title="of a test") as report:
        report.add("decode [bs] 1", 12.345, 0.5)
        assert len(json.loads(path.read_text())["rows"]) == 1
        report.add("extend", None, None, record={"why": "failed"}, missed=True)
    report.save(said=["kept"])
    said = capsys.readouterr().out
    assert "no-such-package not installed" in said
    assert (
        "| workload | us | ratio |\n| --- | --: | --: |\n| decode [bs] 1 | 12.3 | 0.500 |" in said
    )
    assert "| extend | - | - |" in said
    data = json.loads(path.read_text())
    assert data["rows"] == [
        {"workload": "decode [bs] 1", "us": 12.345, "ratio": 0.5},
        {"why": "failed"},
    ]
    assert (data["bars"], data["said"]) == ({"ratio": 1.0}, ["kept"])


def test_a_report_replaces_no_device() -> None:
    about = facts(torch.device("cpu"))
    with pytest.raises(InvalidInput, match="--json: expected a regular file"):
        Report({"us": ".1f"}, about, Path("/dev/null"))


def test_the_contract_s_host_cost_is_reported(tmp_path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    contract = importlib.import_module("benchmarks.contract")
    monkeypatch.setattr(contract, "COUNT", 2)
    path = tmp_path / "figures.json"
    given = ["--rounds", "1", "--json", str(path)]
    result = CliRunner().invoke(contract.main, given, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    rows = json.loads(path.read_text())["rows"]
    assert [row["workload"] for row in rows] == [str(case) for case in contract.CASES]
    for row in rows:
        assert row["forward"] > row["forward_decode"] > 0
        assert row["construction"] > 0
