"""Backends of kernel libraries write K and V in one launch where attnmux-triton is installed."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from attnmux.core import Platform, imported
from attnmux.nvidia import writing
from attnmux.nvidia.fa3 import make
from attnmux.nvidia.fa3_layers import FA3Kernels
from attnmux.testing import decode
from attnmux.testing.adapters import AdapterWorld

WORLD = AdapterWorld(
    library=make,
    kernels=imported(FA3Kernels, "attnmux.emulators.nvidia.sgl_flash_attn"),
    platform=Platform.parse("nvidia:sm90,cuda=13.0"),
    settings={"max_context_len": 64},
)
CUDA = torch.device("cuda")
CONTEXT: Any = SimpleNamespace(
    token_to_kv_pool=SimpleNamespace(device=CUDA, layer_ids=(3,)),
    layers=[SimpleNamespace(layer_id=3)],
)


class Writers:
    """Stands in for `KVWriters`."""

    def __init__(self, pool: Any) -> None:
        self.warmed: list[int] = []

    def warm_up(self, layer: Any) -> None:
        self.warmed.append(layer.layer_id)

    def save(self, *_: Any) -> bool:
        return True


class NoCompiler(Writers):
    def warm_up(self, layer: Any) -> None:
        raise RuntimeError("ptxas not found")


def install(monkeypatch: pytest.MonkeyPatch, writers: type[Writers] | None) -> None:
    """Make `attnmux.triton.write` a module with these writers; None: not installed."""
    module: Any = None
    if writers is not None:
        module = ModuleType("attnmux.triton.write")
        module.KVWriters = writers
    monkeypatch.setitem(sys.modules, "attnmux.triton.write", module)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)


def test_one_layer_is_compiled_when_the_backend_is_made(monkeypatch):
    install(monkeypatch, Writers)
    save = writing.fused_save(CONTEXT)
    assert save is not None
    assert save.__self__.warmed == [3]


def test_without_the_package(monkeypatch):
    install(monkeypatch, None)
    assert writing.fused_save(CONTEXT) is None


def test_a_compiler_that_fails_is_a_warning(monkeypatch):
    install(monkeypatch, NoCompiler)
    with pytest.warns(UserWarning, match="written without Triton: .*ptxas not found"):
        assert writing.fused_save(CONTEXT) is None


@pytest.mark.parametrize("writes", [True, False])
def test_the_pool_writes_what_the_fused_writer_does_not(monkeypatch, writes):
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        writing, "fused_save", lambda context: lambda *call: calls.append(call) or writes
    )
    backend, prepared = WORLD.prepared(decode(5, 9))
    pool, layer = backend.context.token_to_kv_pool, backend.context.layers[0]
    slots = prepared.batch.out_cache_loc
    k, v = (buffer[slots] + 1 for buffer in pool.get_kv_buffer(layer.layer_id))
    backend.save_kv(k, v, layer, prepared.batch)
    assert len(calls) == 1
    assert torch.equal(pool.get_key_buffer(layer.layer_id)[slots], k) != writes
