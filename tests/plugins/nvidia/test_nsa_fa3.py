from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attnmux.core import BackendFailed, Platform
from attnmux.core.plugin import topk_slots
from attnmux.emulators.nvidia import sgl_flash_attn
from attnmux.nvidia.cards.nsa_fa3 import NSA_FA3
from attnmux.nvidia.latent import picked
from attnmux.nvidia.latent.nsa_fa3 import NSAFA3Backend, NSAFA3Kernels, make
from attnmux.nvidia.listed_keys import listed
from attnmux.testing import AttentionBackendTests, decode, extend
from attnmux.testing.adapters.picked import PickedAdapterTests, PickedWorld
from attnmux.testing.adapters.tests import (
    LATENT,
    assert_passes,
    outputs,
    recorded,
)

EMULATED = NSAFA3Kernels(flash_attn_with_kvcache=sgl_flash_attn.flash_attn_with_kvcache)
PAGED = "flash_attn_with_kvcache"
SETTINGS: dict[str, Any] = {
    **LATENT,
    "kind": "nsa",
    "page_size": 16,
    "max_context_len": 320,
    "index_topk": 64,
}


WORLD = PickedWorld(
    library=replace(make, backend=NSAFA3Backend),
    kernels=EMULATED,
    platform=Platform.parse("nvidia:sm90,cuda=13.0"),
    settings=SETTINGS,
)


class TestNSAFA3(AttentionBackendTests):
    backend = WORLD.candidate(NSA_FA3)
    page_sizes = (1, 16, 64)


class TestNSAFA3Adapter(PickedAdapterTests):
    adapter = WORLD


FP16: dict[str, Any] = {"dtype": "float16", "kv_dtype": "float16"}
CASES = {
    "nothing": ((decode(1, 0, 70), decode(0, 0, 3)), {"lse": True}),
    "odd-topk": ((decode(90, 3), extend((80, 3), (0, 7))), {"index_topk": 33, "lse": True}),
    "one-pick": ((decode(90, 3),), {"index_topk": 1}),
    "large-topk": ((decode(200, 3),), {"index_topk": 130}),
    "heads": ((decode(90, 3), extend((70, 5))), {"num_q_heads": 72, "lse": True}),
    "129-heads": ((decode(90, 3),), {"num_q_heads": 129}),
    "scale": ((decode(90, 3),), {"scaling": 0.1, "lse": True}),
    "fp16": ((decode(90, 3), extend((70, 5), (0, 4))), {**FP16, "lse": True}),
    "fp16-graph": ((decode(90, 3, 0), decode(64, 65, 1)), {**FP16, "graph": True}),
    "graph-padding": ((decode(90, 3, 70), decode(64, 65, 1)), {"graph": True, "lse": True}),
    "nothing-new": ((extend((90, 0), (3, 0)),), {}),
    "own-keys": ((extend((0, 80), (0, 7)),), {"save_kv_cache": False, "lse": True}),
    "own-keys-fp16": ((extend((0, 80), (0, 7)),), {"save_kv_cache": False, **FP16}),
}


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_reference(name, page_size) -> None:
    steps, settings = CASES[name]
    given = {**SETTINGS, "page_size": page_size, **settings}
    assert_passes(WORLD.candidate(NSA_FA3), *steps, **given)


@pytest.mark.parametrize("num_splits", [0, 1, 3])
def test_splits_agree(num_splits) -> None:
    candidate = WORLD.candidate(NSA_FA3, num_splits=num_splits)
    assert_passes(candidate, decode(90, 3), lse=True, **SETTINGS)


def test_slots_that_are_seen_come_first_in_their_order() -> None:
    slots = torch.tensor([[-1, 7, -1, 0, 5], [-1] * 5, [4, 3, 2, 1, 9]], dtype=torch.int32)
    table, lens = listed(slots, slots >= 0)
    assert table.tolist() == [[7, 0, 5, 0, 0], [0] * 5, [4, 3, 2, 1, 9]]
    assert lens.tolist() == [3, 0, 5]
    assert (table.dtype, lens.dtype) == (torch.int32, torch.int32)


def test_holes_change_nothing() -> None:
    """The same keys in the same order, with -1 before, between and after them."""
    backend, prepared = WORLD.prepared(decode(40, 7), index_topk=6)
    whole = torch.tensor([[4, 2, 39, -1, -1, -1], [-1] * 6], dtype=torch.int32)
    holed = torch.tensor([[-1, 4, -1, 2, 39, -1], [-1] * 6], dtype=torch.int32)
    lses, results = [], []
    for picks in (whole, holed):
        prepared.batch.topk_indices.copy_(picks)
        lses.append(torch.full((2, 16), 7.0))
        unpicked = replace(prepared.inputs[0], topk_indices=None)
        one = replace(prepared, inputs=(unpicked,))
        results += outputs(backend, one, lse=lses[-1])
    assert torch.equal(*results)
    assert torch.equal(*lses)
    assert bool(results[0][0].any())
    assert not results[0][1].any()
    assert bool(lses[0][1].isneginf().all())


def test_a_layer_is_one_look_up_and_one_call() -> None:
    calls = WORLD.calls(decode(40, 7), extend((16, 9), (0, 4)), page_size=64)
    assert [call.name for call in calls] == ["topk_slots", PAGED] * 4
    for call, tokens in zip(calls[1::2], [2, 2, 13, 13], strict=True):
        q, k_cache, v_cache = call.args
        assert q.shape == (tokens, 1, 16, 64)
        assert call.kwargs["qv"].shape == (tokens, 1, 16, 512)
        assert call.kwargs["page_table"].shape == (tokens, 64)
        assert call.kwargs["cache_seqlens"].shape == (tokens,)
        assert not call.kwargs["causal"]
        assert (k_cache.shape[1:], v_cache.shape[1:]) == ((1, 1, 64), (1, 1, 512))
        assert k_cache.data_ptr() == v_cache.data_ptr() + 512 * v_cache.itemsize


def test_own_keys_need_no_look_up() -> None:
    calls = WORLD.calls(extend((0, 9), (0, 4)), save_kv_cache=False)
    assert [call.name for call in calls] == [PAGED] * 2
    assert [len(each) for call in calls for each in call.args] == [13] * 6


def test_the_kernel_writes_the_caller_s_output() -> None:
    kernels, calls = recorded(EMULATED)
    backend, prepared = WORLD.prepared(decode(40, 7), kernels=kernels)
    one = replace(prepared, inputs=prepared.inputs[:1])
    (expected,) = outputs(backend, one)
    out = torch.full_like(expected, 7)
    assert outputs(backend, one, out=out)[0] is out
    assert torch.equal(out, expected)
    assert calls[-1].kwargs["out"].data_ptr() == out.data_ptr()


@pytest.mark.parametrize(
    ("options", "deterministic", "splits"),
    [({}, False, 0), ({"num_splits": 4}, False, 4), ({"num_splits": 4}, True, 1)],
)
def test_splits(options, deterministic, splits) -> None:
    calls = WORLD.calls(decode(40), options=options, deterministic=deterministic)
    assert calls[1].kwargs["num_splits"] == splits


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"dtype": "float32", "kv_dtype": "float32"}, "token_to_kv_pool: expected float32"),
        ({"kv_dtype": "fp8_e4m3"}, "token_to_kv_pool: expected bfloat16"),
        ({"kv_lora_rank": 256}, "expected mla, 512 [+] 64"),
        ({"windows": (8,)}, "got a layer with sliding_window"),
        ({"sinks": True}, "got a layer with sinks"),
        ({"logit_cap": 30.0}, "got a layer with logit_cap"),
    ],
)
def test_refuses_what_is_not_on_the_card(settings, said) -> None:
    WORLD.refuses(said, decode(3), **settings)


def test_options_that_are_refused() -> None:
    WORLD.refuses("num_splits: expected 0 to 256", decode(3), options={"num_splits": 257})


@pytest.mark.parametrize("offered", [None, lambda table, rows, picks: picks])
def test_the_factory_takes_the_library_and_an_offered_look_up(monkeypatch, offered) -> None:
    context = WORLD.world(decode(3)).context
    monkeypatch.setattr(picked, "shared_kernel", lambda name, context: offered)
    for name in ("sgl_kernel", "sgl_kernel.flash_attn"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(BackendFailed, match="sgl_kernel: "):
        make(context)
    package = SimpleNamespace(flash_attn=sgl_flash_attn)
    monkeypatch.setitem(sys.modules, "sgl_kernel", package)
    monkeypatch.setitem(sys.modules, "sgl_kernel.flash_attn", sgl_flash_attn)
    kernels = make(context).kernels
    assert kernels.topk_slots is (offered or topk_slots)
    assert kernels.flash_attn_with_kvcache is sgl_flash_attn.flash_attn_with_kvcache
