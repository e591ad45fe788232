"""`attnmux bench`: its figures, tables, files and exit codes."""

from __future__ import annotations

import importlib.util
import json
import platform
import re
import sys
from datetime import datetime, timezone
from typing import ClassVar

import pytest
import torch
from click.testing import CliRunner, Result

from attnmux.core import Decision, DeviceGraphs, Measurement, Platform, TunedLaunch
from attnmux.core.cli.verbs import verbs
from attnmux.core.plugin import ANY, NONE
from attnmux.core.verbs import Device
from attnmux.testing import FakeBackend, GraphFakeBackend, RecordingGraphs
from attnmux.testing.bench import cli as bench_cli
from attnmux.testing.bench.cli import bench_run
from attnmux.testing.bench.keeping import RecordFile
from attnmux.testing.bench.roofline import Ceilings

FIELDS = "dtype=bf16,num_q_heads=4,num_kv_heads=2,head_dim=16"
STEPS = ("--workload", "decode:bs=1,ctx=9", "--workload", "decode:bs=4,ctx=9")
EXTEND = ("--workload", "extend:bs=1,new=3")
QUICK = ("--seconds", "0.003", "--check-seconds", "0.2")


class Delayed(GraphFakeBackend):
    """Slow, and the first by its name."""

    def forward_decode(self, call, batch):
        for _ in range(5):
            super().forward_decode(call, batch)
        return super().forward_decode(call, batch)


class WrongElsewhere(FakeBackend):
    """Wrong in batches of 5, which the suite has and no workload below."""

    def forward_decode(self, call, batch):
        out = super().forward_decode(call, batch)
        return out.mul_(1.5) if batch.batch_size == 5 else out


class Launched(FakeBackend):
    """Notes the tuned launches of its contexts."""

    seen: ClassVar[list[tuple[TunedLaunch, ...]]] = []

    def __init__(self, context, options=None) -> None:
        super().__init__(context, options)
        self.seen.append(context.launches)


class Missing(FakeBackend):
    def __init__(self, context, options=None) -> None:
        raise ImportError("libkernels.so: cannot open shared object file")


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTNMUX_MEASUREMENTS", str(tmp_path / "measurements.json"))
    return tmp_path / "measurements.json"


def call(*args: str) -> Result:
    return CliRunner().invoke(verbs, args, prog_name="attnmux")


def bench(*args: str) -> Result:
    asked = () if "--request" in args else ("--request", FIELDS)
    return call("bench", *asked, *QUICK, *args)


def answer(result: Result) -> dict:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_json(installed, here) -> None:
    data = answer(bench("--json", *STEPS, *EXTEND))
    assert set(data) == {
        "platform",
        "device",
        "request",
        "rounding",
        "ceilings",
        "rows",
        "margins",
        "refused",
        "warnings",
    }
    assert Platform.from_dict(data["platform"]) == here
    assert [row["workload"] for row in data["rows"]] == [
        "decode:bs=1,ctx=9",
        "decode:bs=4,ctx=9",
        "extend:bs=1,new=3,prefix=0",
    ]
    for row in data["rows"]:
        assert set(row) == {
            "workload",
            "phase",
            "backend",
            "status",
            "page_size",
            "execution",
            "median_us",
            "rounds_us",
            "prepare_us",
            "cost",
            "share",
            "error",
            "rms_error",
            "worst_error",
            "why",
        }
        assert (row["status"], row["backend"]) == ("measured", "fakes/FakeBackend")
        assert row["median_us"] > 0
        assert row["median_us"] == pytest.approx(sorted(row["rounds_us"])[1])
        assert row["cost"]["flops"] > row["cost"]["nbytes"] / 4 > 0
        assert 0 < row["rms_error"] < 2
        assert row["rms_error"] == pytest.approx(row["error"] * 256)
        assert row["worst_error"] >= row["rms_error"]
    assert data["margins"][0] == {
        "workload": "decode:bs=1,ctx=9",
        "fastest": "fakes/FakeBackend",
        "next": None,
        "ratio": None,
        "noise": None,
        "chosen": "fakes/FakeBackend",
        "cost_of_choice": 1.0,
    }
    assert data["ceilings"]["read_gbs"] > 0
    assert data["request"]["num_q_heads"] == 4


@pytest.mark.parametrize("again", [1e3, 1e-3])
def test_a_ceiling_that_a_backend_exceeds_is_measured_again(installed, monkeypatch, again) -> None:
    measured = [Ceilings(read_gbs=rate, matmul_tflops=rate) for rate in (again, 1e-6)]
    monkeypatch.setattr(bench_run, "ceilings", lambda *_: measured.pop())
    installed(FakeBackend)
    result = bench(*STEPS[2:])
    assert result.exit_code == 0
    assert not measured
    said = " ".join(result.stdout.split())
    assert ("beyond the ceiling" in said) == (again < 1)
    assert f"{again:,.4g} GB/s" in said


def test_tables_have_the_fastest_first_and_reasons(installed, fakes) -> None:
    installed(fakes.Slow, fakes.Wrong, Missing, FakeBackend)
    result = bench(*STEPS[2:])
    assert result.exit_code == 0
    said = [" ".join(line.split()) for line in result.stdout.splitlines()]
    table = [line for line in said if line.startswith("fakes/")]
    assert table[0].startswith("fakes/FakeBackend")
    assert table[1].startswith("fakes/Slow")
    assert " 1.00 " in table[0]
    assert "error: rms in roundings of bfloat16" in " ".join(said)
    error, worst = table[0].split()[4:6]
    assert 0 < float(error) <= float(worst.strip("()")) < 4
    assert float(table[1].split()[2]) > 2
    (wrong,) = [line for line in table if line.startswith("fakes/Wrong")]
    assert "wrong: off by" in wrong
    assert "libkernels.so" in "".join(said)
    assert "4/2 heads of 16, bfloat16" in " ".join(said)
    assert "fastest: fakes/FakeBackend" in " ".join(said)
    assert "times as fast as fakes/Slow" in " ".join(said)
    assert "chosen: fakes/FakeBackend" in " ".join(said)


def test_rounding_is_told_where_the_pool_has_fewer_bits(installed) -> None:
    asked = "num_q_heads=4,num_kv_heads=2,head_dim=16,dtype=bf16,kv_dtype"
    said = bench("--request", f"{asked}=fp8_e4m3", *STEPS[:2]).stdout
    assert re.search(r"rounding of K and V alone: 0\.\d+ in fp8_e4m3, 0\.\d+ in bfloat16", said)
    assert "rounding of" not in bench("--request", f"{asked}=bf16", *STEPS[:2]).stdout


def test_refusals_are_reported(installed) -> None:
    installed(FakeBackend, sinks=NONE)
    result = bench("--request", f"{FIELDS},sinks=yes", *STEPS)
    assert result.exit_code == 3
    assert "fakes/FakeBackend: sinks: not served" in result.stderr


def test_exit_code_where_every_answer_is_wrong(installed, fakes) -> None:
    installed(fakes.Wrong)
    result = bench("--json", *STEPS)
    assert result.exit_code == 3
    rows = json.loads(result.stdout)["rows"]
    assert [row["status"] for row in rows] == ["wrong", "wrong"]
    assert all(row["rms_error"] == pytest.approx(25.6, rel=0.05) for row in rows)


def test_no_backend_at_all(installed) -> None:
    installed()
    result = bench(*STEPS)
    assert result.exit_code == 3
    assert "no plugin offers one for it" in result.stderr


def test_only_named_backends_are_timed(installed, fakes) -> None:
    installed(FakeBackend, fakes.Slow, fakes.Wrong)
    data = answer(bench("--json", "--backend", "Slow", "--backend", "fakes/FakeBackend", *EXTEND))
    assert {row["backend"] for row in data["rows"]} == {"fakes/Slow", "fakes/FakeBackend"}


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--workload", "decode:bs=4"), "ctx=NUMBER"),
        (("--workload", "encoder:bs=4"), "decode:bs=64,ctx=4096"),
        (("--backend", "FakeBackendd"), "did you mean 'FakeBackend'"),
        (("--request", "kind=nsa"), "kind=mha or kind=mla or kind=gdn"),
        (("--request", "multi_item=yes"), "no workload has them"),
        (("--request", "phases=decode", *EXTEND), "the request's phases"),
        (("--request", "heads=4"), "heads"),
        (("--device", "cuda:1"), "cpu"),
        (("--seconds", "0"), "--seconds"),
        (("--platform", "nvidia:sm90"), "a vendor that is on this machine"),
        (("--tp", "2"), "--model"),
        (("--check-seconds", "-1"), "--check-seconds"),
        (("--keep", "--request", "head_dim=64"), "no num_q_heads, num_kv_heads, dtype"),
    ],
)
def test_impossible_options_are_refused(installed, file, args, said) -> None:
    result = bench(*args)
    assert result.exit_code == 2, result.output
    assert said in result.stderr
    assert not file.exists()


def test_without_torch(installed, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, bench_run.__name__)
    monkeypatch.delattr(bench_cli, "bench_run")
    result = bench(*STEPS)
    assert result.exit_code == 3
    assert "pip install 'attnmux-core[torch]'" in result.stderr


def select(*args: str) -> dict:
    return answer(call("select", "--request", FIELDS, "--json", *args))


def test_kept_figures_change_the_choice(installed, file, fakes) -> None:
    """Each of two backends is slow at a size that the other is fast at; their priors are equal."""
    installed(fakes.Slow, fakes.SlowAlone)
    before = select()
    data = answer(bench("--json", "--keep", *STEPS))
    kept = data["kept"]
    assert kept["file"] == str(file)
    assert kept["before"]["hash"] == before["hash"]
    assert [(each["backend"], each["conformant"]) for each in kept["checks"]] == [
        ("fakes/Slow", True),
        ("fakes/SlowAlone", True),
    ]
    stored = Measurement.read(file).found
    assert [each.to_dict() for each in stored] == kept["measurements"]
    assert {each.batch_size for each in stored} == {1, 4}
    after = select()
    assert after["hash"] == kept["after"]["hash"] != before["hash"]
    usual = after["phases"]["decode"]["backend"]
    (other,) = after["decode_sizes"]
    fastest = {1: "Slow", 4: "SlowAlone"}
    assert {usual, other["choice"]["backend"]} == set(fastest.values())
    inside = [size for size in fastest if other["least"] <= size <= (other["most"] or size)]
    assert [fastest[size] for size in inside] == [other["choice"]["backend"]]
    assert other["gain"] > 0.5
    explained = call("select", "--request", FIELDS, "--explain").stdout
    assert f"{other['choice']['backend']} (fakes) serves decode of" in " ".join(explained.split())
    assert "decode_sizes" in json.loads(
        call("select", "--request", FIELDS, "--explain", "--json").stdout
    )
    assert select("--no-measurements")["hash"] == before["hash"]
    assert select("--backend", "Slow")["decode_sizes"] == []
    del after["warnings"], after["proof"]
    assert Decision.from_json(json.dumps(after)).to_dict() == after


def test_figures_from_graphs_count_with_and_without_graphs(installed, file, monkeypatch) -> None:
    monkeypatch.setattr(DeviceGraphs, "of", lambda device: RecordingGraphs())
    installed(GraphFakeBackend, Delayed, graph=ANY)
    data = answer(bench("--json", "--keep", *STEPS[2:]))
    assert {row["execution"] for row in data["rows"]} == {"graph"}
    assert {each["conformant"] for each in data["kept"]["checks"]} == {True}
    assert len(data["kept"]["measurements"]) == 4
    for asked in (FIELDS, f"{FIELDS},graph=yes"):
        said = ("--request", asked, "--json")
        assert backend_for_decode(*said, "--no-measurements") == "Delayed"
        assert backend_for_decode(*said) == "GraphFakeBackend"


def backend_for_decode(*args: str) -> str:
    return answer(call("select", *args))["phases"]["decode"]["backend"]


def test_tables_show_how_the_choice_changes(installed, file, fakes) -> None:
    # Equal ranks: the first by name is chosen, here the faster and there the slower.
    for factories, said in (
        ((FakeBackend, fakes.Slow), "the choice stays: FakeBackend (fakes) serves"),
        ((fakes.Slow, fakes.SlowAlone), "now: "),
    ):
        installed(*factories)
        result = bench("--keep", *STEPS[2:])
        assert result.exit_code == 0, result.output
        words = " ".join(result.stdout.split())
        assert f"fakes/{factories[1].__name__} decode" in words
        assert "conformant" in words
        assert said in words
        assert "2 figures are kept in" in words
    assert "before: Slow (fakes) serves extend and decode" in words
    assert len(Measurement.read(file).found) == 3


@pytest.mark.parametrize("factory", [WrongElsewhere])
def test_a_failed_check_is_kept_as_not_conformant(installed, file, factory, fakes) -> None:
    installed(fakes.Slow, factory)
    data = answer(bench("--json", "--keep", "--check-seconds", "1", *STEPS[2:]))
    checks = {each["backend"]: each for each in data["kept"]["checks"]}
    assert not checks[f"fakes/{factory.__name__}"]["conformant"]
    assert "decode-uneven" in checks[f"fakes/{factory.__name__}"]["failure"]
    assert {each.backend: each.conformant for each in Measurement.read(file).found} == {
        "fakes/Slow": True,
        f"fakes/{factory.__name__}": False,
    }
    assert select()["decode_sizes"] == []


def test_a_wrong_backend_keeps_no_time(installed, file, fakes) -> None:
    installed(fakes.Wrong, FakeBackend)
    data = answer(bench("--json", "--keep", *STEPS[2:]))
    assert [each["backend"] for each in data["kept"]["measurements"]] == ["fakes/FakeBackend"]


@pytest.mark.parametrize("given", [(), ("--keep",)])
def test_backends_are_timed_and_checked_with_tuned_launches(
    installed, here, file, tmp_path, monkeypatch, given
) -> None:
    tuned = TunedLaunch(
        backend="fakes/Launched",
        device=Device.of(here),
        versions={},
        subject={"page": 1},
        values={"warps": 4},
        median_us=1.0,
        date=datetime(2026, 5, 1, tzinfo=timezone.utc),
    )
    path = tmp_path / "launches.json"
    monkeypatch.setenv("ATTNMUX_LAUNCHES", str(path))
    RecordFile(path, TunedLaunch).add([tuned])
    installed(Launched)
    Launched.seen.clear()
    answer(bench("--json", *given, *STEPS[2:]))
    assert len(Launched.seen) > len(given)
    assert set(Launched.seen) == {(tuned,)}


def test_keep_is_refused_where_measurements_are_off(installed, file, monkeypatch) -> None:
    monkeypatch.setenv("ATTNMUX_NO_MEASUREMENTS", "1")
    result = bench("--keep", *STEPS)
    assert result.exit_code == 2
    assert "measurements are not used here (ATTNMUX_NO_MEASUREMENTS)" in result.stderr
    assert bench(*EXTEND).exit_code == 0


@pytest.mark.parametrize("option", ["--seconds", "--check-seconds"])
def test_seconds_that_are_no_number_are_refused(option) -> None:
    result = bench(option, "nan")
    assert result.exit_code == 2
    assert "nan is not a finite number" in result.stderr


def test_an_unwritable_file_is_refused_before_timing(installed, file) -> None:
    file.mkdir()
    result = bench("--keep", *STEPS)
    assert result.exit_code == 2
    assert "cannot be written" in result.stderr
    assert "us of one layer" not in result.stdout


def test_a_file_that_is_not_ours_is_refused_before_timing(installed, file) -> None:
    file.write_text("a diary")
    result = bench("--keep", *STEPS)
    assert result.exit_code == 2
    assert f"{file} cannot be written: it holds something else than measurements" in result.stderr
    assert "us of one layer" not in result.stdout
    assert file.read_text() == "a diary"


def test_a_file_of_another_version_is_a_warning_and_set_aside(installed, file) -> None:
    file.write_text('{"format": 0}')
    result = bench("--json", "--keep", *EXTEND)
    data = answer(result)
    assert any(str(file) in text for text in data["warnings"])
    assert str(file) in result.stderr
    assert len(Measurement.read(file).found) == 1
    assert file.with_name("measurements.json.damaged").read_text() == '{"format": 0}'


def test_a_page(installed, tmp_path, fakes) -> None:
    pytest.importorskip("plotly")
    pytest.importorskip("jinja2")
    installed(FakeBackend, fakes.Slow, fakes.Wrong)
    file = tmp_path / "bench.html"
    told = answer(bench("--json", "--html", str(file), *STEPS, *EXTEND))
    text = file.read_text(encoding="utf-8")
    for words in ("fakes/FakeBackend", "The choice and its margin", "Roofline", "wrong: off by"):
        assert words in text
    assert (
        f"python {platform.python_version()}, torch {torch.__version__.partition('+')[0]}" in text
    )
    assert re.search(r"\d{4}-\d\d-\d\d: <code>attnmux", text)
    timed = [row for row in told["rows"] if row["median_us"] is not None]
    table = text.partition("<h2>All figures")[2].partition("</table>")[0]
    assert table.count("<tr>") == len(timed) + 1 > 1
    assert ("<h2>Not timed" in text) == bool(told["refused"])
    markup = re.sub("<script.*?</script>", "", text, flags=re.DOTALL)
    assert "http" not in markup  # plotly itself names addresses, and loads none for these plots
    assert not re.search("<(link|img|iframe)|src=|@import", markup)
    assert "src=" not in "".join(re.findall("<script[^>]*>", text))


@pytest.mark.parametrize("found", [True, False])
def test_a_page_that_cannot_be_made_is_refused_before_timing(
    installed, tmp_path, monkeypatch, found
) -> None:
    if not found:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    else:
        pytest.importorskip("plotly")
    for file, said in ((str(tmp_path / "no" / "x.html"), "that exists"), ("/dev/null", "regular")):
        result = bench("--html", file, *STEPS)
        assert result.exit_code == 2
        assert (said if found else "attnmux-testing[html]") in result.stderr


def test_without_keep_nothing_is_written(installed, file) -> None:
    answer(bench("--json", *EXTEND))
    assert not file.exists()


def test_the_backends_of_a_cpu(monkeypatch, file) -> None:
    pytest.importorskip("attnmux.cpu.plugin", reason="the backends below are those of attnmux-cpu")
    # flex_attention compiles each of the steps for seconds.
    named = ("--backend", "torch_native", "--backend", "native")
    result = bench("--platform", "cpu", "--json", *named, *STEPS[2:], *EXTEND)
    rows = answer(result)["rows"]
    timed = {row["backend"] for row in rows if row["status"] == "measured"}
    assert "cpu/torch_native" in timed
    assert all(row["status"] == "measured" for row in rows), rows


def test_layers_of_several_shapes_are_refused(tmp_path) -> None:
    content = {
        "model_type": "openelm",
        "num_query_heads": [4, 8],
        "num_kv_heads": [2, 2],
        "head_dim": 64,
    }
    (tmp_path / "config.json").write_text(json.dumps(content))
    result = call("bench", "--model", str(tmp_path))
    assert result.exit_code == 2
    assert "--model: expected layers of one shape" in result.stderr


def test_an_unknown_model_is_refused_unless_assumed(tmp_path) -> None:
    content = {"model_type": "mystery", "num_query_heads": [4, 8], "num_kv_heads": [2, 2]}
    (tmp_path / "config.json").write_text(json.dumps({**content, "head_dim": 64}))
    result = call("bench", "--model", str(tmp_path))
    assert (result.exit_code, "only with --assume" in result.stderr) == (3, True)
    result = call("bench", "--model", str(tmp_path), "--assume")
    assert "warning: unknown model type mystery: read as causal MHA" in result.stderr
    assert "--model: expected layers of one shape" in result.stderr
