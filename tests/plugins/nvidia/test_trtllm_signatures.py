"""The emulators of TensorRT-LLM's kernels take what flashinfer's functions take."""

from __future__ import annotations

import importlib
import inspect
import json
from pathlib import Path

import pytest

from attnmux.emulators.nvidia.flashinfer import trtllm_decode, trtllm_mla, trtllm_prefill

RECORDED = json.loads(
    (Path(__file__).parent / "data" / "flashinfer-trtllm-0.6.13.json").read_text()
)
EMULATORS = {
    "flashinfer.decode": trtllm_decode,
    "flashinfer.prefill": trtllm_prefill,
    "flashinfer.mla": trtllm_mla,
}
FUNCTIONS = [(module, name) for module, names in RECORDED["modules"].items() for name in names]


def parameters(function) -> list[list[str | None]]:
    """Name, kind and default of each, as recorded."""
    return [
        [found.name, found.kind.name, None if found.default is found.empty else repr(found.default)]
        for found in inspect.signature(function).parameters.values()
    ]


@pytest.mark.parametrize(("module", "name"), FUNCTIONS)
def test_emulated_signature(module, name) -> None:
    recorded = RECORDED["modules"][module][name]
    assert parameters(getattr(EMULATORS[module], name)) == recorded


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("module", "name"), FUNCTIONS)
def test_installed_signature(module, name) -> None:
    """Whatever is installed takes what the adapters pass: the recorded arguments, in order."""
    pytest.importorskip("flashinfer")
    recorded = RECORDED["modules"][module][name]
    installed = parameters(getattr(importlib.import_module(module), name))
    assert [each for each in installed if each in recorded] == recorded
