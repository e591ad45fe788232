"""`attnmux bench`: what is timed, told and kept, and how it ends."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from datetime import datetime, timezone
from typing import ClassVar

import pytest
from click.testing import CliRunner, Result

from attnmux.core.choosing.find.devices import Detection
from attnmux.core.choosing.find.plugins import PluginFailure
from attnmux.core.choosing.machine.platform import Platform
from attnmux.core.choosing.measured.launches import TunedLaunch, launch_file
from attnmux.core.choosing.measured.measurement import read_measurements
from attnmux.core.choosing.measured.records import Device
from attnmux.core.choosing.offer.card import Offer
from attnmux.core.choosing.offer.conditions import ANY, NONE
from attnmux.core.choosing.tell.decision import Decision
from attnmux.core.cli import run as shared
from attnmux.core.cli.verbs import verbs

torch = pytest.importorskip("torch", reason="timing runs the backends")

from attnmux.bench import cli as bench_cli  # noqa: E402
from attnmux.bench import field  # noqa: E402
from attnmux.bench.cli import bench_timing  # noqa: E402
from attnmux.bench.timing import Ceilings  # noqa: E402
from attnmux.testing import (  # noqa: E402
    FakeBackend,
    GraphFakeBackend,
    RecordingGraphs,
    fake_card,
    fake_platform,
)

FIELDS = "dtype=bf16,num_q_heads=4,num_kv_heads=2,head_dim=16"
STEPS = ("--workload", "decode:bs=1,ctx=9", "--workload", "decode:bs=4,ctx=9")
EXTEND = ("--workload", "extend:bs=1,new=3")
QUICK = ("--seconds", "0.003", "--check-seconds", "0.2")
HERE = replace(fake_platform(), name="a machine")


class Slow(FakeBackend):
    """Five times the work where it decodes more than one request."""

    def forward_decode(self, call, batch):
        for _ in range(20 if batch.batch_size > 1 else 0):
            super().forward_decode(call, batch)
        return super().forward_decode(call, batch)


class SlowAlone(FakeBackend):
    """The same for one request alone."""

    def forward_decode(self, call, batch):
        for _ in range(20 if batch.batch_size == 1 else 0):
            super().forward_decode(call, batch)
        return super().forward_decode(call, batch)


class Delayed(GraphFakeBackend):
    """Slow, and the first by its name."""

    def forward_decode(self, call, batch):
        for _ in range(5):
            super().forward_decode(call, batch)
        return super().forward_decode(call, batch)


class Wrong(FakeBackend):
    def attend(self, *args, **kwargs):
        out, lse = super().attend(*args, **kwargs)
        return out * 1.1, lse


class WrongElsewhere(FakeBackend):
    """Wrong for more requests than are timed, which the suite has."""

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


class Installed:
    """Plugins with cards of this test's."""

    failures: tuple[PluginFailure, ...] = ()
    loaded = ("of-this-test",)

    def __init__(self, offers: tuple[Offer, ...]) -> None:
        self._offers = offers

    def offers(self) -> tuple[Offer, ...]:
        return self._offers


@pytest.fixture
def installed(monkeypatch, request):
    monkeypatch.setitem(sys.modules, __name__, request.module)
    monkeypatch.setattr(shared, "detect", lambda plugins: Detection(platforms=(HERE,)))
    # Hundreds of MB and of megaflops, for each call of the verb
    reached = Ceilings(read_gbs=10.0, matmul_tflops=0.5)
    monkeypatch.setattr(bench_timing, "ceilings", lambda *_: reached)

    def put(*factories: type, **conditions) -> None:
        offers = tuple(
            Offer(
                card=replace(
                    fake_card(**conditions),
                    name=factory.__name__,
                    factory=f"{factory.__module__}:{factory.__name__}",
                ),
                plugin="fakes",
                distribution="attnmux-fake",
                version="1.0",
            )
            for factory in factories
        )
        monkeypatch.setattr(shared, "load_plugins", lambda *_: Installed(offers))

    put(FakeBackend)
    return put


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTNMUX_MEASUREMENTS", str(tmp_path / "measurements.json"))
    return tmp_path / "measurements.json"


def call(*args: str) -> Result:
    return CliRunner().invoke(verbs, args, prog_name="attnmux")


def bench(*args: str) -> Result:
    return call("bench", "--request", FIELDS, *QUICK, *args)


def answer(result: Result) -> dict:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_json(installed) -> None:
    data = answer(bench("--json", *STEPS, *EXTEND))
    assert set(data) == {
        "platform",
        "device",
        "request",
        "ceilings",
        "rows",
        "refused",
        "warnings",
    }
    assert Platform.from_dict(data["platform"]) == HERE
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
            "prepare_us",
            "share",
            "error",
            "why",
        }
        assert (row["status"], row["backend"]) == ("measured", "fakes/FakeBackend")
        assert row["median_us"] > 0
    assert data["ceilings"]["read_gbs"] > 0
    assert data["request"]["num_q_heads"] == 4


def test_people_see_the_fastest_first_and_why_others_are_not_timed(installed) -> None:
    installed(Slow, Wrong, Missing, FakeBackend)
    result = bench(*STEPS[2:])
    assert result.exit_code == 0
    said = [" ".join(line.split()) for line in result.stdout.splitlines()]
    table = [line for line in said if line.startswith("fakes/")]
    assert table[0].startswith("fakes/FakeBackend")
    assert table[1].startswith("fakes/Slow")
    assert " 1.00 " in table[0]
    assert float(table[1].split()[2]) > 2
    (wrong,) = [line for line in table if line.startswith("fakes/Wrong")]
    assert "wrong: off by" in wrong
    assert "libkernels.so" in "".join(said)
    assert "4/2 heads of 16, bfloat16" in " ".join(said)


def test_those_that_refuse_are_told(installed) -> None:
    installed(FakeBackend, sinks=NONE)
    result = bench("--request", f"{FIELDS},sinks=yes", *STEPS)
    assert result.exit_code == 3
    assert "fakes/FakeBackend: sinks: wanted yes, offered none" in result.stderr


def test_nothing_could_be_timed(installed) -> None:
    installed(Wrong)
    result = bench("--json", *STEPS)
    assert result.exit_code == 3
    assert [row["status"] for row in json.loads(result.stdout)["rows"]] == ["wrong", "wrong"]


def test_no_backend_at_all(installed) -> None:
    installed()
    result = bench(*STEPS)
    assert result.exit_code == 3
    assert "no plugin offers one for it" in result.stderr


def test_only_those_that_are_named(installed) -> None:
    installed(FakeBackend, Slow, Wrong)
    data = answer(bench("--json", "--backend", "Slow", "--backend", "fakes/FakeBackend", *EXTEND))
    assert {row["backend"] for row in data["rows"]} == {"fakes/Slow", "fakes/FakeBackend"}


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--workload", "decode:bs=4"), "ctx=NUMBER"),
        (("--workload", "verify:bs=4"), "decode:bs=64,ctx=4096"),
        (("--backend", "FakeBackendd"), "did you mean 'FakeBackend'"),
        (("--request", "kind=nsa"), "kind=mha or kind=mla"),
        (("--request", "multi_item=yes"), "no workload has them"),
        (("--request", "phases=decode", *EXTEND), "the phases that are asked for"),
        (("--request", "heads=4"), "heads"),
        (("--device", "cuda:1"), "cpu"),
        (("--seconds", "0"), "--seconds"),
        (("--platform", "nvidia:sm90"), "a vendor that is on this machine"),
        (("--tp", "2"), "--model"),
        (("--check-seconds", "-1"), "--check-seconds"),
        (("--keep", "--request", "head_dim=64"), "no num_q_heads, num_kv_heads, dtype"),
    ],
)
def test_what_cannot_be_asked(installed, file, args, said) -> None:
    result = bench(*args)
    assert result.exit_code == 2, result.output
    assert said in result.stderr
    assert not file.exists()


def test_without_torch(installed, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, bench_timing.__name__)
    monkeypatch.delattr(bench_cli, "bench_timing")
    result = bench(*STEPS)
    assert result.exit_code == 3
    assert "pip install 'attnmux-core[torch]'" in result.stderr


def select(*args: str) -> dict:
    return answer(call("select", "--request", FIELDS, "--json", *args))


def test_what_is_kept_changes_the_choice(installed, file) -> None:
    """Each of two is slow at a size that the other is fast at; the priors hold them level."""
    installed(Slow, SlowAlone)
    before = select()
    data = answer(bench("--json", "--keep", *STEPS))
    kept = data["kept"]
    assert kept["file"] == str(file)
    assert kept["before"]["hash"] == before["hash"]
    assert [(each["backend"], each["conformant"]) for each in kept["checks"]] == [
        ("fakes/Slow", True),
        ("fakes/SlowAlone", True),
    ]
    stored = read_measurements(file).found
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
    del after["warnings"]
    assert Decision.from_json(json.dumps(after)).to_dict() == after


def test_what_was_timed_in_a_graph_counts_for_who_asks_for_graphs(
    installed, file, monkeypatch
) -> None:
    monkeypatch.setattr(field, "device_graphs", lambda device: RecordingGraphs())
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


def test_people_see_what_changes(installed, file) -> None:
    # Level in rank: the one whose name comes first is chosen, here the faster and there the slower.
    for factories, said in (
        ((FakeBackend, Slow), "the choice stays: FakeBackend (fakes) serves"),
        ((Slow, SlowAlone), "now: "),
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
    assert len(read_measurements(file).found) == 3


@pytest.mark.parametrize("factory", [WrongElsewhere])
def test_one_that_does_not_conform_is_kept_as_such(installed, file, factory) -> None:
    installed(Slow, factory)
    data = answer(bench("--json", "--keep", "--check-seconds", "30", *STEPS[2:]))
    checks = {each["backend"]: each for each in data["kept"]["checks"]}
    assert not checks[f"fakes/{factory.__name__}"]["conformant"]
    assert "decode-uneven" in checks[f"fakes/{factory.__name__}"]["failure"]
    assert {each.backend: each.conformant for each in read_measurements(file).found} == {
        "fakes/Slow": True,
        f"fakes/{factory.__name__}": False,
    }
    assert select()["decode_sizes"] == []


def test_one_that_is_wrong_keeps_no_time(installed, file) -> None:
    installed(Wrong, FakeBackend)
    data = answer(bench("--json", "--keep", *STEPS[2:]))
    assert [each["backend"] for each in data["kept"]["measurements"]] == ["fakes/FakeBackend"]


@pytest.mark.parametrize("given", [(), ("--keep",)])
def test_backends_are_timed_and_checked_with_tuned_launches(
    installed, file, tmp_path, monkeypatch, given
) -> None:
    tuned = TunedLaunch(
        backend="fakes/Launched",
        device=Device.of(HERE),
        versions={},
        subject={"page": 1},
        values={"warps": 4},
        median_us=1.0,
        date=datetime(2026, 5, 1, tzinfo=timezone.utc),
    )
    path = tmp_path / "launches.json"
    monkeypatch.setenv("ATTNMUX_LAUNCHES", str(path))
    launch_file(path).add([tuned])
    installed(Launched)
    Launched.seen.clear()
    answer(bench("--json", *given, *STEPS[2:]))
    assert len(Launched.seen) > len(given)
    assert set(Launched.seen) == {(tuned,)}


def test_measurements_that_are_not_to_be_used(installed, file, monkeypatch) -> None:
    monkeypatch.setenv("ATTNMUX_NO_MEASUREMENTS", "1")
    result = bench("--keep", *STEPS)
    assert result.exit_code == 2
    assert "measurements are not used here (ATTNMUX_NO_MEASUREMENTS)" in result.stderr
    assert bench(*EXTEND).exit_code == 0


def test_a_file_that_cannot_be_written_is_said_before_anything_is_timed(installed, file) -> None:
    file.mkdir()
    result = bench("--keep", *STEPS)
    assert result.exit_code == 2
    assert "cannot be written" in result.stderr
    assert "us of one layer" not in result.stdout


def test_a_corrupt_file_is_a_warning_and_set_aside(installed, file) -> None:
    file.write_text("{")
    result = bench("--json", "--keep", *EXTEND)
    data = answer(result)
    assert any(str(file) in text for text in data["warnings"])
    assert str(file) in result.stderr
    assert len(read_measurements(file).found) == 1
    assert file.with_name("measurements.json.damaged").read_text() == "{"


def test_without_keep_nothing_is_written(installed, file) -> None:
    answer(bench("--json", *EXTEND))
    assert not file.exists()


def test_the_backends_of_a_cpu(monkeypatch, file) -> None:
    pytest.importorskip("attnmux.cpu.plugin", reason="the backends below are those of attnmux-cpu")
    result = bench("--platform", "cpu", "--json", *STEPS[2:], *EXTEND)
    rows = answer(result)["rows"]
    timed = {row["backend"] for row in rows if row["status"] == "measured"}
    assert "cpu/torch_native" in timed
    assert all(row["status"] == "measured" for row in rows), rows
