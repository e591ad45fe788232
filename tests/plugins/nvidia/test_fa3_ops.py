"""FlashAttention 3 by the operators of vLLM and of FlashAttention itself."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import torch

from attnmux.core import BackendFailed, InvalidInput, Platform
from attnmux.core.choosing.requirements import required
from attnmux.emulators.candidates import EMULATED, FA3_OF_FLASH_ATTN, FA3_OF_VLLM, SGL_FLASH_ATTN
from attnmux.nvidia import vllm_files
from attnmux.nvidia.cards.dual_chunk_flash_attn import DUAL_CHUNK_FLASH_ATTN
from attnmux.nvidia.cards.fa3 import FA3
from attnmux.nvidia.cards.nsa_fa3 import NSA_FA3
from attnmux.nvidia.fa3 import providers as fa3_providers
from attnmux.nvidia.fa3.backend import make
from attnmux.nvidia.fa3.dual_chunk import make as dual_chunk
from attnmux.nvidia.fa3.dual_chunk import of_fa3 as of_dual_chunk
from attnmux.nvidia.fa3.ops import merge_state_v2
from attnmux.nvidia.latent.nsa_fa3 import NSAFA3Backend, of_fa3
from attnmux.nvidia.latent.nsa_fa3 import make as nsa_fa3
from attnmux.testing import AttentionBackendTests, decode, extend, verify
from attnmux.testing.adapters.tests import LATENT, AdapterWorld, assert_passes

HOPPER = Platform.parse("nvidia:sm90,cuda=13.0")
WORLD = AdapterWorld(library=make, kernels=FA3_OF_VLLM, platform=HOPPER)


@pytest.mark.turns(32)
class TestFA3OfVllm(AttentionBackendTests):
    backend = EMULATED["fa3-vllm"].make()
    page_sizes = (1, 16)


@pytest.mark.turns(32)
class TestFA3OfFlashAttn(AttentionBackendTests):
    backend = EMULATED["fa3-flash_attn_3"].make()
    page_sizes = (16,)


class TestFA3MLAOfVllm(AttentionBackendTests):
    backend = EMULATED["fa3_mla-vllm"].make()
    page_sizes = (1, 16)


def test_trees_are_merged_by_plain_operations():
    tree = {"spec_topk": 2, "page_size": 1, "lse": True}
    assert_passes(EMULATED["fa3-vllm"].make(), verify(4, 9, 30), **tree)


def test_nsa_fa3_and_dual_chunk_take_any_build():
    for library, card, kernels, settings in (
        (replace(nsa_fa3, backend=NSAFA3Backend), NSA_FA3, of_fa3(FA3_OF_VLLM),
         {**LATENT, "kind": "nsa", "index_topk": 64}),
        (dual_chunk, DUAL_CHUNK_FLASH_ATTN, of_dual_chunk(FA3_OF_VLLM),
         {"kind": "dual_chunk", "dual_chunk_len": 32}),
    ):  # fmt: skip
        world = AdapterWorld(library=library, kernels=kernels, platform=HOPPER)
        steps = decode(90, 3), extend((70, 5), (0, 7))
        assert_passes(world.candidate(card), *steps, page_size=16, lse=True, **settings)


SINKS = torch.zeros(8)


@pytest.mark.parametrize(
    ("kernels", "layer", "lacks"),
    [
        (FA3_OF_VLLM, {"attention_chunk_size": 16}, "attention chunks"),
        (FA3_OF_VLLM, {"sinks": SINKS, "v_head_dim": 32}, "sinks over V of other dims"),
        (FA3_OF_FLASH_ATTN, {"sinks": SINKS}, "sinks"),
    ],
)
def test_what_a_build_lacks_is_the_next_ones(kernels, layer, lacks):
    context = WORLD.world(decode(5)).context
    layers = tuple(replace(each, **layer) for each in context.layers)
    context = replace(context, layers=layers)
    with pytest.raises(BackendFailed, match=lacks):
        make.backend(context, {}, kernels)
    library = replace(make, providers={"first": lambda: kernels, "second": lambda: SGL_FLASH_ATTN})
    try:
        made = library(context)
    except InvalidInput:  # dims that no build serves get that far too
        return
    assert made.kernels is SGL_FLASH_ATTN


def test_merging_of_one_empty_set():
    v, empty = torch.randn(3, 2, 8), torch.zeros(3, 2, 8)
    s, nothing = torch.randn(3, 2), torch.full((3, 2), -torch.inf)
    out, lse = merge_state_v2(v.clone(), s, empty, nothing, v_merged=torch.empty_like(v))
    torch.testing.assert_close(out, v)
    torch.testing.assert_close(lse, s)


def test_vllms_file_is_loaded_without_vllm(monkeypatch, tmp_path):
    name = "_attnmux_test_ops"
    loaded, operators = [], SimpleNamespace()

    def load(file):
        loaded.append(file)
        operators.fwd = print

    monkeypatch.setattr(torch.ops, "load_library", load)
    monkeypatch.setattr(torch.ops, name, operators, raising=False)
    with pytest.raises(ModuleNotFoundError, match="vllm"):
        vllm_files.load_operators(name, "fwd", f"vllm_flash_attn/{name}")
    package = tmp_path / "vllm"
    (package / "vllm_flash_attn").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('vllm is imported')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match="other devices"):
        vllm_files.load_operators(name, "fwd", f"vllm_flash_attn/{name}")
    file = package / "vllm_flash_attn" / f"{name}.abi3.so"
    file.touch()
    assert vllm_files.load_operators(name, "fwd", f"vllm_flash_attn/{name}") is operators
    assert vllm_files.load_operators(name, "fwd", f"vllm_flash_attn/{name}") is operators
    assert loaded == [file]
    assert "vllm" not in sys.modules


def test_any_package_with_the_kernels_is_enough():
    installed = {"torch": "2.14.0", "vllm": "0.33.0"}
    _, library = required(FA3, installed.get, "attnmux-nvidia")
    assert (library.state, library.installed, library.hint) == ("present", "vllm 0.33.0", "")
    _, library = required(FA3, {"torch": "2.14.0", "vllm": "0.31.2"}.get, "attnmux-nvidia")
    assert (library.state, library.installed) == ("too old", "vllm 0.31.2")
    assert library.hint == "pip install 'attnmux-nvidia[fa3]'"


def test_flash_attns_operators(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn_3", ModuleType("flash_attn_3"))
    monkeypatch.setitem(sys.modules, "flash_attn_3._C", ModuleType("flash_attn_3._C"))
    operators = SimpleNamespace(
        fwd=SimpleNamespace(default=len), get_scheduler_metadata=SimpleNamespace(default=len)
    )
    monkeypatch.setattr(torch.ops, "flash_attn_3", operators, raising=False)
    kernels = fa3_providers.PROVIDERS["flash_attn_3"]()
    assert kernels.lacks == FA3_OF_FLASH_ATTN.lacks
