"""Interfaces are found in sources as Python would find them by importing."""

from __future__ import annotations

from pathlib import Path

import pytest

from attnmux.core import AttnmuxError, Integration, Interface
from attnmux.core.engines.engine_interfaces import missing
from tools.engine_interfaces import differences

SOURCES = {
    "engine/__init__.py": "",
    "engine/api/__init__.py": """
from .. import layers
from ..base import Base
from engine.layers import Layer as Layer, run
""",
    "engine/layers.py": """
from typing import Generic

from engine.api import Base as Parent

try:
    import fast
    FAST = True
except ImportError:
    FAST = False

class Layer(Parent[int]):
    size: int

    def __init__(self, size, *, dtype=None):
        self.size, self.names[0] = size, ""
        self.cache = None

    def forward(self, q, k, out, scale=1.0):
        pass

def run(layer, step, *, graph):
    layer.ran = True
""",
    "engine/base.py": """
class Base:
    kind = "dense"

    @classmethod
    def make(cls, config):
        pass
""",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in SOURCES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    "interface",
    [
        Interface("engine.api"),
        Interface("engine.layers", "FAST"),
        Interface("engine.layers", "Layer", ("size",), ("size", "cache", "kind", "make")),
        Interface("engine.layers", "Layer", ("size", "dtype")),
        Interface("engine.api", "Layer.forward", ("q", "k", "out")),
        Interface("engine.api", "Layer.make", ("config",)),
        Interface("engine.api", "layers.Layer.forward", ("q", "k", "out", "scale")),
        Interface("engine.api", "run", ("layer", "step", "graph"), ("ran",)),
        Interface(
            "engine.api", "Layer.forward", ("q", "k", "out", "scale", "later"), overridden=True
        ),
    ],
)
def test_present(interface, folder):
    assert missing([interface], folder) == []


@pytest.mark.parametrize(
    ("interface", "gap"),
    [
        (Interface("engine.gone"), "engine.gone"),
        (Interface("engine.layers", "SLOW"), "engine.layers:SLOW"),
        (Interface("engine.layers", "Layer.backward", ("q",)), "engine.layers:Layer.backward"),
        (Interface("engine.layers", "Layer", None, ("heads",)), "engine.layers:Layer.heads"),
        (
            Interface("engine.api", "run", ("layer", "step")),
            "engine.api:run(layer, step), which is (layer, step, graph)",
        ),
        (
            Interface("engine.api", "Layer.forward", ("k", "q", "out")),
            "engine.api:Layer.forward(k, q, out), which is (q, k, out, scale)",
        ),
        (
            Interface("engine.api", "Layer.forward", ("q", "k", "out", "mask")),
            "engine.api:Layer.forward(q, k, out, mask), which is (q, k, out, scale)",
        ),
        (
            Interface("engine.api", "Layer.forward", ("q", "k", "out"), overridden=True),
            "engine.api:Layer.forward(q, k, out), which is (q, k, out, scale)",
        ),
        (
            Interface("engine.api", "Layer.forward", ("q", "out", "k", "scale"), overridden=True),
            "engine.api:Layer.forward(q, out, k, scale), which is (q, k, out, scale)",
        ),
        (Interface("engine.layers", "FAST", ()), "engine.layers:FAST()"),
    ],
)
def test_missing(interface, gap, folder):
    assert missing([interface], folder) == [gap]


def test_an_engine_that_is_not_installed_lacks_everything():
    assert missing([Interface("no_such_engine.api", "run")]) == ["no_such_engine.api:run"]


class EngineWarning(UserWarning):
    pass


INTEGRATION = Integration(
    name="attnmux-engine",
    engine=("engine", "engine-cpu"),
    remedy="install engine 2",
    warning=EngineWarning,
)
PRESENT = (Interface("engine.api", "run", ("layer", "step", "graph")),)
GONE = Interface("engine.gone")


@pytest.fixture
def engine(folder, monkeypatch):
    """On the path, with the versions of its distributions by name."""
    monkeypatch.syspath_prepend(folder)
    versions: dict[str, str] = {}
    name = "attnmux.core.engines.engine_interfaces.installed_version"
    monkeypatch.setattr(name, lambda distribution: versions.get(distribution, ""))
    return versions


@pytest.mark.parametrize(
    ("versions", "interfaces", "text"),
    [
        ({}, PRESENT, ""),
        ({}, (*PRESENT, GONE), "engine (not from a package), which lacks engine.gone"),
        ({"engine-cpu": "1.5"}, (GONE,), "engine-cpu 1.5, which lacks engine.gone"),
        (
            {"engine": "1.4", "engine-cpu": "1.5"},
            (GONE, *PRESENT, GONE),
            "engine 1.4, which lacks engine.gone and 1 more",
        ),
    ],
)
def test_an_integration_says_what_the_engine_lacks(engine, versions, interfaces, text):
    engine.update(versions)
    whole = f"attnmux-engine cannot serve in {text}: install engine 2" if text else ""
    assert INTEGRATION.misfit(interfaces) == whole


def test_an_integration_warns_its_caller_or_raises(engine):
    def register() -> bool:
        return INTEGRATION.fits([GONE])

    with pytest.warns(EngineWarning, match=r"lacks engine\.gone: install engine 2") as warned:
        assert not register()
    assert warned[0].filename == __file__
    with pytest.raises(AttnmuxError, match=r"lacks engine\.gone: install engine 2"):
        INTEGRATION.require([GONE])
    assert INTEGRATION.fits(PRESENT)
    INTEGRATION.require(PRESENT)


def test_differences_between_releases(folder, tmp_path):
    newer = tmp_path / "newer"
    for name, text in SOURCES.items():
        (newer / name).parent.mkdir(parents=True, exist_ok=True)
        changed = text.replace("out, scale=1.0", "out, scale=1.0, sinks=None")
        (newer / name).write_text(changed)
    asked = [Interface("engine.api", "Layer.forward", ("q",)), Interface("engine.api", "run")]
    assert differences(asked, folder, newer) == [
        "engine.api:Layer.forward\n"
        "  - (self, q, k, out, scale=1.0)\n"
        "  + (self, q, k, out, scale=1.0, sinks=None)"
    ]
