"""The emulator and the real library take the same arguments."""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attnmux.emulators.nvidia import flashinfer as emulator

RECORDED = json.loads((Path(__file__).parent / "data" / "flashinfer-0.6.13.json").read_text())
NAMES = sorted(RECORDED["signatures"])
MODULES = {
    "fast_decode_plan": "flashinfer.decode",
    "get_batch_prefill_attention_sink_uri": "flashinfer.jit.attention",
}
"""Of what the package itself does not offer."""


def parameters(function: Callable[..., Any]) -> list[list[str | None]]:
    """Name, kind and default of each, as recorded."""
    return [
        [found.name, found.kind.name, None if found.default is found.empty else repr(found.default)]
        for found in inspect.signature(function).parameters.values()
    ]


def named(module: object, name: str) -> Callable[..., Any]:
    for part in name.split("."):
        module = getattr(module, part)
    return module  # type: ignore[return-value]  # a function


@pytest.mark.parametrize("name", NAMES)
def test_emulated_signature(name) -> None:
    assert parameters(named(emulator, name)) == RECORDED["signatures"][name]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NAMES)
def test_installed_signature(name) -> None:
    """Whatever is installed takes what the adapter passes: the recorded arguments, in order."""
    library = pytest.importorskip("flashinfer")
    module = importlib.import_module(MODULES[name]) if name in MODULES else library
    installed = parameters(named(module, name))
    assert [each for each in installed if each in RECORDED["signatures"][name]] == (
        RECORDED["signatures"][name]
    )
