"""Two vendors' devices in one machine: an error that names both, unless somebody decides."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from attnmux.core import Platform
from attnmux.core.cli import run as shared
from attnmux.core.cli.verbs import verbs
from attnmux.core.find.devices import Detection


@pytest.fixture
def call(monkeypatch):
    found = tuple(map(Platform.parse, ("amd:gfx942", "nvidia:sm90", "cpu:x86_64")))
    monkeypatch.setattr(shared.Plugins, "detect", lambda plugins: Detection(platforms=found))

    def invoke(*args: str):
        return CliRunner().invoke(verbs, args, prog_name="attnmux")

    return invoke


def picked(call) -> str:
    result = call("platforms", "--json")
    assert [found["vendor"] for found in json.loads(result.stdout)["platforms"]] == [
        "amd",
        "nvidia",
        "cpu",
    ]
    return json.loads(result.stdout)["picked"]


def test_undecided_is_an_error_that_names_both(call) -> None:
    result = call("select", "--json")
    assert result.exit_code == 2
    for part in ("amd:gfx942 and nvidia:sm90", "--platform", "ATTNMUX_PLATFORM", "attnmux.toml"):
        assert part in result.stderr
    assert picked(call) is None


def test_the_environment_decides_over_the_file(call, monkeypatch) -> None:
    Path("attnmux.toml").write_text('platform = "amd"\n')
    assert picked(call) == "amd:gfx942"
    monkeypatch.setenv("ATTNMUX_PLATFORM", "nvidia")
    assert picked(call) == "nvidia:sm90"


@pytest.mark.parametrize("by", ["user", "env", "config"])
def test_whoever_decides_no_error_is_left(call, monkeypatch, by) -> None:
    pytest.importorskip("attnmux.cpu.plugin")
    args = ["select", "--json", "--request", "dtype=bfloat16"]
    if by == "env":
        monkeypatch.setenv("ATTNMUX_PLATFORM", "cpu")
    elif by == "config":
        Path("attnmux.toml").write_text('platform = "cpu"\n')
    else:
        args += ["--platform", "cpu"]
    result = call(*args)
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["platform"]["vendor"] == "cpu"


def test_what_the_user_says_wins(call, monkeypatch) -> None:
    monkeypatch.setenv("ATTNMUX_PLATFORM", "acme")
    result = call("select", "--json", "--platform", "cpu")
    assert result.exit_code == 0, result.stderr
    refused = call("select", "--json")
    assert refused.exit_code == 2
    said = "ATTNMUX_PLATFORM: expected one of amd:gfx942, nvidia:sm90, cpu:x86_64, got 'acme'"
    assert said in refused.stderr


def test_a_platform_of_the_file_is_refused_with_the_file(call) -> None:
    Path("attnmux.toml").write_text('platform = "acme"\n')
    refused = call("select", "--json")
    assert refused.exit_code == 2
    assert "attnmux.toml: platform: expected one of amd:gfx942" in refused.stderr


@pytest.mark.parametrize("wanted", ["acme", ""])
def test_a_vendor_that_is_not_here_is_refused_with_the_words_for_another_machine(
    call, wanted
) -> None:
    for verb in ("select", "matrix"):
        refused = call(verb, "--platform", wanted)
        assert refused.exit_code == 2
        said = "--platform: expected one of amd:gfx942, nvidia:sm90, cpu:x86_64; or, for a machine"
        assert f"{said} elsewhere, PRODUCT or VENDOR:ARCH[,KEY=VALUE]…" in refused.stderr
