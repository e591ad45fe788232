"""The adapter on vllm-xpu-kernels' own Python, above its operator in plain torch."""

from __future__ import annotations

import mmap
from dataclasses import replace
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from attnmux.core import BackendFailed, InvalidInput, Platform
from attnmux.intel.cards.vllm_xpu import VLLM_XPU
from attnmux.intel.vllm_xpu import make
from attnmux.intel.vllm_xpu_shapes import SHAPES
from attnmux.testing import AttentionBackendTests, decode, extend, verify
from attnmux.testing.adapters.tests import (
    AdapterWorld,
    EagerAdapterTests,
    assert_passes,
    check_layers_outside_the_pool,
    outputs,
)

if find_spec("vllm_xpu_kernels") is None:
    pytest.skip("needs vllm-xpu-kernels", allow_module_level=True)

from attnmux.emulators.intel.vllm_xpu import KERNELS  # where there is the package

WORLD = AdapterWorld(
    library=make,
    kernels=KERNELS,
    platform=Platform.parse("intel:xe2"),
    host_lens=True,
    settings={"page_size": 64, "max_context_len": 256},
)
CANDIDATE = WORLD.candidate(VLLM_XPU)


class TestVLLMXPUEmulated(AttentionBackendTests):
    backend = CANDIDATE
    page_sizes = (16, 64)


class TestAdapter(EagerAdapterTests):
    adapter = WORLD
    step = extend((140, 3), (0, 9))

    no_graphs = "graphs"


@pytest.mark.parametrize("step", [decode(150, 5), extend((140, 3), (0, 50), (9, 1)), verify(3, 90)])
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_every_shape(step, shapes) -> None:
    for dim in shapes.head_dims:
        settings = {"head_dim": dim, "v_head_dim": dim, "num_q_heads": shapes.most_group}
        windows = (5, 70) if shapes.windows else (None, None)
        more = {"num_kv_heads": 1, "windows": windows, "sinks": shapes.sinks}
        topk = 1 if step.mode.is_target_verify() else None
        more |= {"page_size": 64, "max_context_len": 256, "spec_topk": topk}
        assert_passes(CANDIDATE, step, **settings, **more)


def test_long_requests_are_split_and_agree() -> None:
    settings = {"page_size": 64, "max_context_len": 4096, "num_kv_heads": 1}
    assert_passes(CANDIDATE, decode(4000, 1500), **settings)
    assert_passes(CANDIDATE, verify(4, 3000, 1500), spec_topk=1, **settings)


def test_the_call_s_own_keys_are_all_keys() -> None:
    check_layers_outside_the_pool(WORLD, extend((0, 5), (0, 1), (0, 70)))


def test_requests_without_new_tokens_are_left_out() -> None:
    (call, *_) = WORLD.calls(extend((9, 3), (5, 0), (70, 1), (4, 0)), kv_in_pool=True)
    assert call.kwargs["cu_seqlens_q"].tolist() == [0, 3, 4]
    assert call.kwargs["seqused_k"].tolist() == [12, 71]
    assert len(call.kwargs["block_table"]) == 2


def test_deterministic_steps_split_no_keys_and_share_a_kernel() -> None:
    settings: dict[str, Any] = {"kv_in_pool": True, "deterministic": True}
    (call, *_) = WORLD.calls(decode(9), **settings)
    assert call.kwargs["num_splits_kv"] == call.kwargs["max_seqlen_q"] == 1
    (call, *_) = WORLD.calls(extend((9, 3), (5, 3)), **settings)
    assert call.kwargs["max_seqlen_q"] == 256
    (call, *_) = WORLD.calls(extend((9, 3), (5, 3)), kv_in_pool=True)
    assert call.kwargs["max_seqlen_q"] == 3
    assert call.kwargs["num_splits_kv"] is None
    with pytest.raises(InvalidInput, match="split by the size of the batch"):
        WORLD.prepared(verify(3, 9), spec_topk=1, deterministic=True)


def test_an_lse_is_refused() -> None:
    backend, made = WORLD.prepared(decode(5))
    with pytest.raises(InvalidInput, match=r"^lse: .*the kernels write none"):
        outputs(backend, made, lse=torch.empty(1, made.inputs[0].q.shape[1]))


@pytest.mark.parametrize(
    "settings",
    [
        {"head_dim": 80, "v_head_dim": 80},
        {"head_dim": 192, "v_head_dim": 128},
        {"head_dim": 192, "v_head_dim": 192, "windows": (8, None)},
        {"sinks": True, "windows": (8, None)},
        {"sinks": True, "num_q_heads": 16, "num_kv_heads": 1},
        {"page_size": 32},
        {"logit_cap": 30.0},
        {"attention_chunk": 16},
        {"num_q_heads": 32, "num_kv_heads": 1},
        {"dtype": "float32"},
        {"kv_dtype": "fp8_e4m3"},
    ],
)
def test_what_the_kernels_do_not_serve_is_refused(settings: dict[str, Any]) -> None:
    world = WORLD.world(decode(5), **settings)
    with pytest.raises(InvalidInput):
        WORLD.backend(world.context)


def test_rows_without_keys_or_requests_are_zero() -> None:
    for step, zero in ((decode(0, 9), slice(1)), (extend((9, 3), trailing=2), slice(3, None))):
        backend, made = WORLD.prepared(step)
        given = made.inputs[0]
        backend.context.token_to_kv_pool.get_key_buffer(given.layer.layer_id)[:16] = 1
        out = torch.full((made.batch.num_tokens, *given.q.shape[1:]), torch.nan).to(given.q.dtype)
        outputs(backend, replace(made, inputs=(given,)), out=out)
        assert out.isfinite().all()
        assert not out[zero].any()
        assert out.any()


def test_without_its_library_it_says_what_to_install() -> None:
    """The package's Python imports without it."""
    with pytest.raises(BackendFailed, match=r"vllm-xpu-kernels: .*pip install vllm-xpu-kernels"):
        make(WORLD.world(decode(5)).context)


def test_a_shape_without_a_kernel_does_not_go_on_in_plain_torch() -> None:
    """Of the emulator: the real operator's error lets the package's Python go on."""
    (call, *_) = WORLD.calls(decode(9), kv_in_pool=True)
    sinks = torch.zeros(16).bfloat16()
    wide = {name: call.kwargs[name].repeat(1, 2, 1) for name in ("q", "out")}
    with pytest.raises(RuntimeError, match="no kernel"):
        KERNELS.flash_attn_varlen_func(
            **{**call.kwargs, **wide, "window_size": [4, 0], "s_aux": sinks}
        )


@pytest.mark.parametrize("generation", [2, 3])
def test_the_package_has_a_kernel_for_every_shape(generation: int) -> None:
    spec = find_spec("vllm_xpu_kernels")
    (folder,) = spec.submodule_search_locations
    path = Path(folder) / f"libattn_kernels_xe_{generation}.so"
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as symbols:
        for shapes in SHAPES:
            flags = product({False, shapes.windows}, {False, shapes.sinks})
            for dim, (window, sinks) in product(shapes.head_dims, flags):
                # Of prefill: over pages, causal where there is no window, sinks, window, LSE.
                prefill = "".join("ft"[flag] for flag in (1, not window, sinks, window, 0))
                assert symbols.find(f"chunk_policy_head{dim}_{prefill}".encode()) >= 0
                for group in {8, shapes.most_group}:
                    assert _has_decode(symbols, group, dim, (False, window, sinks))
        assert not _has_decode(symbols, 16, 192, (False, False, False))


def _has_decode(symbols: mmap.mmap, group: int, dim: int, flags: tuple[bool, ...]) -> bool:
    """Whether there is the decode kernel of a tile of `group` heads, for pages of 64.

    flags: causal, window, sinks. A name that was mangled repeats a number by its place.
    """
    page = "S7_" if dim == 64 else "NS5_ILi64EEE"
    marks = "".join(f"Lb{flag:d}E" for flag in flags)
    name = f"decode_policy_qpacked_headIN4cute1CILi{group}EEENS5_ILi{dim}EEE{page}E{marks}"
    return symbols.find(name.encode()) >= 0
