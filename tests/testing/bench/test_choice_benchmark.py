"""The benchmark of the solver's choice: the backends that it compares, and its bars."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from attnmux.core import Platform, Policy
from attnmux.core.cli import run as shared
from attnmux.core.verbs import Shipped
from attnmux.testing import FakeBackend
from attnmux.testing.bench import Workload

ROOT = Path(__file__).parents[3]


@pytest.fixture
def choice(monkeypatch: pytest.MonkeyPatch, known_ceilings) -> Any:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.choice.__main__")


def called(choice, *args: str) -> str:
    result = CliRunner().invoke(choice.main, args, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


QUICK = ("--seconds", "0.003", "--check-seconds", "0.05")


def test_the_backends_of_a_cpu(choice, tmp_path) -> None:
    pytest.importorskip("attnmux.cpu.plugin", reason="the backends below are those of attnmux-cpu")
    path = tmp_path / "figures.json"
    given = ("--tiny", "--without", "flex_attention", "--json", str(path))
    output = called(choice, *given, *QUICK)
    figures = json.loads(path.read_text(encoding="utf-8"))
    assert [row["part"] for row in figures["rows"]] == ["choice"] * 3 + ["sizes"] * 2
    for step in figures["rows"]:
        assert step["times"][step["chosen"]] > 0
        assert "cpu/flex_attention" not in step["times"]
    assert [text.split(":")[0] for text in figures["said"]] == [
        "choice, geometric mean",
        "choice, worst",
        "decode sizes, worst",
        "always nvidia/fa3",
    ]
    assert all(text in output for text in figures["said"])


def test_each_size_is_decoded_by_its_backend(
    choice, installed, monkeypatch, tmp_path, fakes
) -> None:
    """Each of two backends is slow at one size. The machine's own measurements are left alone."""
    kept = tmp_path / "measurements.json"
    monkeypatch.setenv("ATTNMUX_MEASUREMENTS", str(kept))
    installed(fakes.Slow, fakes.SlowAlone, fakes.Wrong)
    measuring = importlib.import_module("benchmarks.choice.measuring").Measuring(
        seconds=0.003, check_seconds=0.05
    )
    served, notes = measuring.serve(choice.TINY_SIZES)
    assert [each.chosen for each in served] == ["fakes/Slow", "fakes/SlowAlone"]
    assert [each.best for each in served] == ["fakes/Slow", "fakes/SlowAlone"]
    assert all("fakes/Wrong" not in each.times for each in served)
    assert any(text.startswith("fakes/Wrong, decode:bs=1,ctx=9: wrong") for text in notes)
    assert choice.sizes_bar(served).is_kept
    assert choice.sizes_bar(served).found < 1.01
    assert not kept.exists()


def test_a_backend_that_is_left_out_is_not_chosen(choice, installed, fakes) -> None:
    installed(FakeBackend, fakes.Slow)
    measuring = importlib.import_module("benchmarks.choice.measuring").Measuring(
        without=("FakeBackend",), seconds=0.003, check_seconds=0.05
    )
    served, _ = measuring.serve(choice.TINY_SIZES)
    assert [(each.chosen, list(each.times)) for each in served] == [
        ("fakes/Slow", ["fakes/Slow"])
    ] * 2


def test_a_backend_replaced_by_its_companion_has_no_time(choice) -> None:
    pytest.importorskip("attnmux.nvidia.plugin", reason="it has backends with companions")
    entrants = importlib.import_module("attnmux.testing.bench.entrants")
    run = shared.Run()
    found, _ = entrants.find_entrants(
        choice.MODELS[-1].request,
        Platform.parse("nvidia:sm90,cuda=13.0"),
        run.plugins(run.settings()).offers(),
        Policy(),
        phases=("decode",),
    )
    seen = {each.offer.address for each in found}
    assert "nvidia/fa3_mla" in seen
    assert "nvidia/fa3" not in seen


def test_a_model_that_fails_misses_the_bars_and_the_others_go_on(choice, installed) -> None:
    installed()
    output = called(choice, "--part", "choice", *QUICK)
    assert "choice, worst: no figure, at most 1.05: MISSED" in output
    assert "no backend serves this" in output or "no plugin" in output


def step(choice, chosen: str, size: int = 1, **times: float) -> Any:
    return choice.Served(
        model="a model",
        workload=Workload(phase="decode", batch_size=size, prefix=8),
        chosen=chosen,
        times=times,
    )


def test_the_bars_of_the_choice(choice) -> None:
    kept = [step(choice, "a", a=100.0, b=101.0), step(choice, "a", 2, a=100.0, b=99.0)]
    mean, worst = choice.choice_bars(kept)
    assert mean.found == pytest.approx((100 / 99) ** 0.5)
    assert worst.found == pytest.approx(100 / 99)
    assert worst.where.startswith("decode:bs=2")
    assert mean.is_kept
    assert worst.is_kept
    mean, worst = choice.choice_bars([*kept, step(choice, "a", 4, a=106.0, b=100.0)])
    assert not mean.is_kept
    assert not worst.is_kept


def test_a_chosen_backend_without_a_time_misses_every_bar(choice) -> None:
    served = [step(choice, "a", a=1.0, b=2.0), step(choice, "c", 2, a=1.0)]
    bars = [*choice.choice_bars(served), choice.sizes_bar(served)]
    assert [bar.is_kept for bar in bars] == [False] * 3
    assert "decode:bs=2" in bars[0].where


def test_sizes_are_compared_with_the_one_backend_that_is_best_over_all(choice) -> None:
    served = [
        step(choice, "b", 1, a=100.0, b=102.0),
        step(choice, "b", 2, a=100.0, b=50.0),
        step(choice, "c", 4, a=100.0, b=120.0, c=90.0),
    ]
    assert choice.best_single(served) == "b"
    assert choice.sizes_bar(served).found == pytest.approx(1.0)
    served[0] = step(choice, "a", 1, a=104.0, b=102.0)
    assert not choice.sizes_bar(served).is_kept
    assert "batch size 1, against b alone" in str(choice.sizes_bar(served))


def test_the_cost_of_one_backend_for_all(choice) -> None:
    served = [
        choice.Served(model="m", workload=Workload.parse(text), chosen="x", times=times)
        for text, times in (
            ("decode:bs=1,ctx=9", {"nvidia/fa3": 2.0, "x": 1.0}),
            ("decode:bs=2,ctx=9", {"nvidia/fa3_mla": 1.0, "x": 2.0}),
            ("decode:bs=4,ctx=9", {"x": 2.0}),
        )
    ]
    said = choice.always(served)
    assert "geometric mean 1.4142, worst 2.0000 (of 2 steps out of 3)" in said


def test_the_steps_match_those_of_triton_gpu(choice) -> None:
    workloads = [each for model in choice.MODELS for each in model.workloads]
    kinds = [
        (each.phase, model.request.kind) for model in choice.MODELS for each in model.workloads
    ]
    assert kinds.count(("decode", "mha")) == 11
    assert kinds.count(("decode", "mla")) == 4
    assert kinds.count(("extend", "mha")) == 4
    assert len(workloads) == 19
    sizes = [each.batch_size for each in choice.SIZES.workloads]
    assert (sizes[0], sizes[-1]) == (1, 64)
    assert {each.keys for each in choice.SIZES.workloads} == {4096}


def test_regret_is_kept_over_several_runs(choice, tmp_path) -> None:
    pytest.importorskip("attnmux.cpu.plugin", reason="the backends below are those of attnmux-cpu")
    times = tmp_path / "times.jsonl"
    given = ("--tiny", "--seed", "3", "--count", "1", "--times", str(times), "--seconds", "0.003")
    given += ("--backend", "torch_native", "--without", "native", "--without", "flex_attention")
    assert "8 without times" in called(choice, *given, "--minutes", "0")
    output = called(choice, *given, "--minutes", "5")
    assert "0 without times; bars: mean 1.02, 99th percentile 1.1: kept" in output
    assert len(times.read_text().split()) > 8
    assert "| all | 8 | 1.0000, 1.000, 1.000 | 1.0000, 1.000, 1.000 |" in output
    # Nothing is left to measure, and another seed's steps are others
    before = times.read_text()
    called(choice, *given, "--minutes", "5")
    assert times.read_text() == before
    other = tuple("4" if arg == "3" else arg for arg in given)
    assert "8 without times" in called(choice, *other, "--minutes", "0")


def test_two_processes_share_the_steps_and_a_kill_costs_one(choice, tmp_path) -> None:
    regret = importlib.import_module("benchmarks.choice.regret")
    steps = list(regret.wanted(3, 2))
    spot = SimpleNamespace(
        compiled=lambda left, jobs, end: left,
        entrants=lambda steps: [],
        rows=lambda *_: [],
        check_device=lambda rows: None,
    )
    times = regret.Times(path=tmp_path / "times.jsonl", seed=3)
    assert regret.measure(spot, times, steps, 1, 0, (0, 2)) == 8
    times.path.write_text(times.path.read_text()[:-20])
    assert regret.measure(spot, times, steps, 1, 0, (1, 2)) == 8
    assert {each.draw.family for each in steps if each.number == 1} == {f for f, _ in times.read()}
    assert regret.measure(spot, times, steps, 1, 0) == 1
    assert len(times.read()) == len(steps) == 16


def test_what_a_batch_size_tells_of_figures(choice) -> None:
    """The invented file has one shape whose fastest backend depends on the batch size."""
    figures = importlib.import_module("benchmarks.choice.figures")
    file = ROOT / "tests/core/measured/figures/nvidia-sm90-h200.json"
    shipped = Shipped.read(file)
    by_phase, by_size = (
        list(figures.losses(shipped, "decode", known)) for known in figures.KNOWN.values()
    )
    assert by_phase == pytest.approx([1, 1, 100 / 90, 1, 1])
    assert by_size == [1] * 5
    output = CliRunner().invoke(figures.main, [str(file)], catch_exceptions=False).output
    assert "| decode | phase | 5 | 1.0222, 1.111, 1.111 |" in output


def test_regret_counts_what_is_beyond_the_noise(choice) -> None:
    regret = importlib.import_module("benchmarks.choice.regret")
    step = next(iter(regret.wanted(1, 1)))
    rounds = {"a": [10.0, 10.5, 11.0], "b": [10.8, 12.0, 12.5], "c": [20.0, 20.0, 20.0]}
    timed = replace(step, rounds=rounds)
    assert timed.regret("a") == 1.0
    assert timed.regret("b") == 1.0
    assert timed.regret("c") == pytest.approx(20 / 10.5)
    assert timed.regret("d") is None
    assert regret.percentile([1.0] * 99 + [2.0], 0.99) == 1.0
    assert regret.percentile([1.0] * 98 + [2.0] * 2, 0.99) == 2.0
    assert not regret.is_kept([1.0] * 98 + [2.0] * 2)
