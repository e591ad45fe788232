"""`attnmux platforms` and `attnmux backends`."""

from __future__ import annotations

import json
from dataclasses import fields
from importlib.metadata import EntryPoint

import pytest
from click.testing import CliRunner

from attnmux.core import Platform, Plugins
from attnmux.core.cli import run as shared
from attnmux.core.cli.verbs import verbs
from attnmux.core.find.devices import Detection
from attnmux.core.find.plugin import Plugin, PluginFailure
from attnmux.core.plugin import BackendCard, Clause, one_of


@pytest.fixture
def call():
    def invoke(*args: str):
        return CliRunner().invoke(verbs, args, prog_name="attnmux")

    return invoke


def test_platforms(call) -> None:
    result = call("platforms", "--json")
    assert result.exit_code == 0
    data = json.loads(result.stdout)
    assert set(data) == {"platforms", "picked", "unserved", "failures", "warnings"}
    assert data["platforms"][-1]["vendor"] == "cpu"
    assert Platform.from_dict(data["platforms"][-1]).core_count >= 1
    table = call("platforms")
    assert table.exit_code == 0
    assert "cpu:" in table.stdout


def test_platforms_that_are_ambiguous_are_still_listed(call, monkeypatch) -> None:
    found = tuple(map(Platform.parse, ("amd:gfx942", "nvidia:sm90,memory=141GB", "cpu:x86_64")))
    monkeypatch.setattr(shared.Plugins, "detect", lambda plugins: Detection(platforms=found))
    result = call("platforms", "--json")
    assert result.exit_code == 0
    data = json.loads(result.stdout)
    assert data["picked"] is None
    assert len(data["platforms"]) == 3
    assert "several kinds of accelerator" in result.stderr
    assert "141 GB" in call("platforms").stdout


def test_platforms_are_listed_where_the_configured_one_is_missing(call, monkeypatch) -> None:
    monkeypatch.setenv("ATTNMUX_PLATFORM", "acme")
    result = call("platforms", "--json")
    assert result.exit_code == 0
    data = json.loads(result.stdout)
    assert data["picked"] is None
    assert data["platforms"]
    assert any(
        warning.startswith("ATTNMUX_PLATFORM: expected one of ") and "got 'acme'" in warning
        for warning in data["warnings"]
    )


def test_backends(call) -> None:
    pytest.importorskip("attnmux.cpu.plugin")
    result = call("backends", "--json")
    assert result.exit_code == 0
    data = json.loads(result.stdout)
    (card,) = [card for card in data["backends"] if card["name"] == "torch_native"]
    assert (card["plugin"], card["distribution"]) == ("cpu", "attnmux-cpu")
    assert card["requires"] == [["torch>=2.11"]]
    assert card["clauses"][0]["page_size"] == "any"
    assert "arch" not in card["clauses"][0]
    assert "graph" not in card["clauses"][0]
    assert card["priors"][0]["when"]["vendor"] == "cpu"
    assert {field.name for field in fields(BackendCard)} <= set(card)
    assert card["fp8_products"] is False
    assert card["sources"]["kv_dtype"].startswith("8-bit and 4-bit floats are widened")
    (on_cpu,) = [run for run in card["verified_on"] if run["platform"] == "cpu:x86_64"]
    assert on_cpu["emulated"] is False
    assert (card["proof"], card["here"]) == ("hardware", "ready")
    assert "torch_native" in call("backends").stdout


def test_a_backend_of_a_device_that_is_not_here_is_not_ready(call, monkeypatch) -> None:
    platforms = (Platform.parse("acme:v1,device=cpu"), Platform.parse("cpu:x86_64"))
    monkeypatch.setattr(shared.Plugins, "detect", lambda plugins: Detection(platforms=platforms))
    here = {}
    for vendor in ("acme", "zeta"):
        clauses = (Clause.when(vendor=one_of(vendor)),)
        card = BackendCard(name=vendor, summary="", clauses=clauses, factory="a:b")
        plugin = Plugin(EntryPoint("p", "", "attnmux"), "d", cards=(card,))
        monkeypatch.setattr(shared.Plugins, "load", lambda p=plugin, **_: Plugins(loaded=(p,)))
        (row,) = json.loads(call("backends", "--json").stdout)["backends"]
        here[vendor] = row["here"]
        assert row["here"] in call("backends").stdout
    assert here == {"acme": "ready", "zeta": "other hardware"}


def test_a_broken_plugin_is_a_warning_and_a_row(call, monkeypatch) -> None:
    failure = PluginFailure(
        plugin="bad", distribution="dist-bad", version="0.3", stage="load", error="OSError: gone"
    )
    monkeypatch.setattr(shared.Plugins, "load", lambda **_: Plugins(failures=[failure]))
    result = call("backends", "--json")
    assert result.exit_code == 0
    assert "plugin bad (dist-bad 0.3): OSError: gone" in result.stderr
    (row,) = json.loads(result.stdout)["failures"]
    assert (row["plugin"], row["stage"]) == ("bad", "load")


def test_without_a_plugin_a_warning_says_what_to_install(call, monkeypatch) -> None:
    monkeypatch.setattr(shared.Plugins, "load", lambda settings: Plugins())
    result = call("backends", "--json")
    assert json.loads(result.stdout)["backends"] == []
    assert "no plugin offers a backend: pip install attnmux-cpu" in result.stderr
    # Then another warning names the setting
    assert "no plugin offers" not in call("backends", "--no-plugins").stderr
