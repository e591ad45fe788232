"""The installed command and the installed plugins, in processes of their own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

import pytest

from attnmux.core import Plugins
from attnmux.core.cards.named import KNOWN

WITHOUT_TORCH = """
import sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch" or name.startswith("torch."):
            raise ModuleNotFoundError("No module named 'torch'", name="torch")

sys.meta_path.insert(0, NoTorch())
sys.argv = ["attnmux", *sys.argv[1:]]
from attnmux.core.cli import main
main()
"""


def clean_environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if not key.startswith("ATTNMUX_")}


@pytest.fixture
def without_torch(tmp_path):
    def call(*args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", WITHOUT_TORCH, *args],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=clean_environment(),
            timeout=60,
            check=False,
        )

    return call


@pytest.fixture
def command(tmp_path):
    """The console script."""
    script = shutil.which("attnmux", path=sysconfig.get_path("scripts"))
    if script is None:
        pytest.skip("attnmux-core is not installed in this environment")

    def call(*args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [script, *args],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=clean_environment(),
            timeout=60,
            check=False,
        )

    return call


@pytest.mark.parametrize(
    "args",
    [
        ["select", "--json"],
        ["select"],
        ["select", "--json", "--platform", "nvidia:sm90,cuda=12.8"],
        ["platforms", "--json"],
        ["backends", "--json"],
        ["doctor", "--json"],
        ["--help"],
    ],
)
def test_it_answers_where_torch_cannot_be_imported(without_torch, args) -> None:
    done = without_torch(*args)
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.parametrize("verb", ["select", "platforms", "backends", "doctor"])
def test_it_does_not_import_torch_where_torch_is(verb, tmp_path) -> None:
    """Also not in a `try`, which the absence of torch would hide."""
    code = (
        "import sys; from attnmux.core.cli.verbs import verbs;"
        f"verbs(['{verb}', '--json'], standalone_mode=False);"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        cwd=tmp_path,
        env=clean_environment(),
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_command(command) -> None:
    done = command("select", "--json", "--platform", "cpu:x86_64")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["phases"]["decode"]["plugin"] == "cpu"
    assert command("select", "--request", "kind=nsa,deterministic=true").returncode == 3
    assert command("select", "--request", "kind=x").returncode == 2
    assert command("selcet").returncode == 2
    assert command().returncode in (0, 2)


def test_a_reader_that_goes_away_is_no_traceback(command, tmp_path) -> None:
    script = shutil.which("attnmux", path=sysconfig.get_path("scripts"))
    line = f"{script} backends --json | head -c 1"
    done = subprocess.run(
        line, shell=True, capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert "Traceback" not in done.stderr


def test_every_installed_plugin_of_ours_loads() -> None:
    plugins = Plugins.load()
    offers = plugins.offers()
    assert not [row for row in plugins.failures if row.distribution.startswith("attnmux-")]
    installed = {
        found.name
        for found in metadata.distributions()
        if found.entry_points.select(group="attnmux")
    }
    assert installed <= {plugin.distribution for plugin in plugins.loaded}
    assert all(offer.version for offer in offers)


def test_the_list_for_hints_knows_every_backend_of_ours() -> None:
    known = json.loads(KNOWN.read_text())
    for offer in Plugins.load().offers():
        if offer.distribution in known:
            assert offer.card.name in known[offer.distribution]


def test_the_list_for_hints_is_of_our_own_plugins() -> None:
    members = Path(__file__).parents[2] / "plugins"
    assert set(json.loads(KNOWN.read_text())) == {
        f"attnmux-{path.name}" for path in members.iterdir()
    }


def test_an_entry_point_s_name_is_its_package(monkeypatch) -> None:
    for point in metadata.entry_points(group="attnmux"):
        if point.dist is not None and point.dist.name.startswith("attnmux-"):
            assert point.value == f"attnmux.{point.name}.plugin"
            assert point.dist.name == f"attnmux-{point.name}"
