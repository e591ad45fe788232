"""`attnmux select` where something was measured on this machine."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from datetime import datetime, timezone

import pytest
from click.testing import CliRunner

from attnmux.core import Measurement, Platform, Plugins, Request
from attnmux.core.cli import run as shared
from attnmux.core.cli.verbs import verbs
from attnmux.core.find.devices import Detection
from attnmux.core.verbs import Device, Question
from attnmux.testing.bench.keeping import RecordFile

pytest.importorskip("attnmux.cpu.plugin", reason="the backends below are those of attnmux-cpu")
pytest.importorskip("torch", reason="what those backends require")

HERE = replace(
    Platform.parse("cpu:x86_64,features=avx2+cxx_compiler", is_here=True), name="a machine"
)
FIELDS = "dtype=bf16,num_q_heads=8,num_kv_heads=8,head_dim=64"


@pytest.fixture
def file(tmp_path, monkeypatch):
    """The user's file, in which the backend that the priors favour less is the faster one."""
    monkeypatch.setattr(shared.Plugins, "detect", lambda plugins: Detection(platforms=(HERE,)))
    monkeypatch.setattr("attnmux.core.Settings.cache_folder", lambda *_: tmp_path / "cache")
    return tmp_path / "cache" / "measurements.json"


def measure(file, times) -> None:
    offers = {offer.address: offer for offer in Plugins.load().offers()}
    RecordFile(file, Measurement).add(
        [
            Measurement(
                backend=address,
                phase=phase,
                shape=Measurement.shape_of(
                    Question(request=Request.parse(FIELDS), platform=HERE, phase=phase)
                ),
                workload="batch=1",
                device=Device.of(HERE),
                versions=offers[address].versions(),
                median_us=median_us,
                conformant=True,
                date=datetime(2026, 5, 1, tzinfo=timezone.utc),
            )
            for address, median_us in times.items()
            for phase in ("extend", "decode")
        ],
    )


def select(*args: str):
    return CliRunner().invoke(verbs, ["select", "--request", FIELDS, *args], prog_name="attnmux")


def ranked(*args: str) -> list[str]:
    """The backends that fit in decode, the chosen one first."""
    result = select("--json", *args)
    assert result.exit_code == 0, result.stderr
    data = json.loads(result.stdout)
    fitting = [v for v in data["candidates"] if v["phase"] == "decode" and v["rank"] is not None]
    assert fitting[0]["backend"] == data["phases"]["decode"]["backend"]
    return [verdict["backend"] for verdict in fitting]


def test_the_faster_one_is_chosen_unless_that_is_to_be_ignored(file, monkeypatch) -> None:
    favourite, second = ranked()[:2]
    measure(file, {f"cpu/{favourite}": 400.0, f"cpu/{second}": 100.0})
    assert ranked()[:2] == [second, favourite]
    explained = select("--explain")
    assert "measured on this machine" in " ".join(explained.stdout.split())
    assert "(measured on this machine; the fastest of 2)" in explained.stdout
    assert ranked("--no-measurements")[0] == favourite
    assert ranked("--backend", favourite, "--no-measurements")[0] == favourite
    elsewhere = select("--platform", str(HERE), "--json")
    assert not any(v["measured"] for v in json.loads(elsewhere.stdout)["candidates"])
    monkeypatch.setenv("ATTNMUX_NO_MEASUREMENTS", "1")
    assert ranked()[0] == favourite


def test_a_backend_that_is_named_is_taken(file) -> None:
    favourite, second = ranked()[:2]
    measure(file, {f"cpu/{favourite}": 400.0, f"cpu/{second}": 100.0})
    data = json.loads(select("--backend", favourite, "--json").stdout)
    assert data["phases"]["decode"]["backend"] == favourite


def test_another_file(file, tmp_path, monkeypatch) -> None:
    favourite, second = ranked()[:2]
    other = tmp_path / "other.json"
    measure(other, {f"cpu/{favourite}": 400.0, f"cpu/{second}": 100.0})
    (tmp_path / "attnmux.toml").write_text(f'measurements = "{other}"\n')
    assert ranked()[0] == second


def test_a_path_in_the_configuration_is_relative_to_it(file, tmp_path, monkeypatch) -> None:
    favourite, second = ranked()[:2]
    measure(tmp_path / "other.json", {f"cpu/{favourite}": 400.0, f"cpu/{second}": 100.0})
    (tmp_path / "attnmux.toml").write_text('measurements = "other.json"\n')
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    assert ranked()[0] == second
    monkeypatch.setenv("ATTNMUX_MEASUREMENTS", "other.json")
    assert ranked()[0] == favourite
    monkeypatch.chdir(tmp_path)
    assert ranked()[0] == second


def test_a_damaged_file_is_a_warning(file) -> None:
    before = ranked()
    file.parent.mkdir(exist_ok=True)
    file.write_text("{")
    result = select("--json")
    assert (result.exit_code, ranked()) == (0, before)
    assert str(file) in result.stderr
    assert any(str(file) in text for text in json.loads(result.stdout)["warnings"])


def test_nothing_of_it_is_imported_where_nothing_was_measured(file, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "attnmux.core.measured.ranking", None)
    assert ranked()
