"""Graphs that plugins provide for the devices of their vendors."""

from __future__ import annotations

import sys

import pytest
import torch

from attnmux.core import DeviceGraphs, GraphUnsupported

DEVICE = torch.device("cpu")
GRAPHS = """
from attnmux.testing import RecordingGraphs

class AcmeGraphs(RecordingGraphs):
    def __init__(self, device):
        self.device = device
"""
PLUGIN = """
from attnmux.core.plugin import hookimpl

@hookimpl
def attnmux_cards():
    return []
"""


@pytest.fixture
def install(tmp_path, monkeypatch, fresh_plugins):
    """Installs a plugin that provides graphs of one type of device."""
    monkeypatch.setattr(sys, "path", [*sys.path[:1], str(tmp_path), *sys.path[1:]])
    monkeypatch.setattr("attnmux.core.Settings.cache_folder", lambda *_: tmp_path / "cache")

    def install(source: str = GRAPHS, name: str = "acme", device_type: str = "cpu") -> None:
        info = tmp_path / f"{name}_graphs-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Name: {name}-graphs\nVersion: 1.0\n")
        entries = f"[attnmux]\n{name} = {name}_plugin\n"
        entries += f"[attnmux.graphs]\n{device_type} = {name}_graphs:AcmeGraphs\n"
        (info / "entry_points.txt").write_text(entries)
        (tmp_path / f"{name}_plugin.py").write_text(PLUGIN)
        (tmp_path / f"{name}_graphs.py").write_text(source)
        monkeypatch.delitem(sys.modules, f"{name}_graphs", raising=False)

    return install


def test_a_plugin_s_are_made_for_the_device(install) -> None:
    install()
    graphs = DeviceGraphs.of(DEVICE)
    assert type(graphs).__name__ == "AcmeGraphs"
    assert graphs.device == DEVICE


def test_another_type_s_are_asked_for_by_name(install) -> None:
    install(device_type="acme")
    assert DeviceGraphs.of(DEVICE, "acme").device == DEVICE
    with pytest.raises(GraphUnsupported, match="no graphs for 'cpu' devices"):
        DeviceGraphs.of(DEVICE)


def test_a_plugin_that_is_left_out_provides_none(install, monkeypatch) -> None:
    install("raise AssertionError")
    monkeypatch.setenv("ATTNMUX_DENY_PLUGINS", "acme-graphs")
    with pytest.raises(GraphUnsupported, match="no graphs for 'cpu' devices"):
        DeviceGraphs.of(DEVICE)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import no_such_library", "ModuleNotFoundError"),
        ("class AcmeGraphs:\n    pass", "TypeError"),
        ("def AcmeGraphs(device):\n    raise OSError('no driver')", "OSError: no driver"),
    ],
)
def test_graphs_that_cannot_be_made(install, source, said) -> None:
    install(source)
    with pytest.raises(GraphUnsupported, match=f"acme-graphs's graphs of 'cpu' devices: {said}"):
        DeviceGraphs.of(DEVICE)


def test_two_plugins_for_one_type(install) -> None:
    install()
    install(name="rocket")
    with pytest.raises(GraphUnsupported, match="acme-graphs and rocket-graphs both provide"):
        DeviceGraphs.of(DEVICE)
