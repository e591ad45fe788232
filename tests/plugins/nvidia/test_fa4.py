from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from attnmux.core import (
    ForwardMode,
    Platform,
)
from attnmux.emulators.nvidia.flash_attn_cute import FlashAttnCute
from attnmux.nvidia.cards.fa4 import FA4
from attnmux.nvidia.fa4 import FA4Kernels, make
from attnmux.testing import (
    AttentionBackendTests,
    decode,
    extend,
    verify,
)
from attnmux.testing.adapters.checks import check_keys_of_another_dtype_are_refused
from attnmux.testing.adapters.tests import (
    LATENT,
    AdapterWorld,
    EagerAdapterTests,
    KernelCall,
    assert_passes,
    check_layers_outside_the_pool,
    outputs,
    recorded,
)

PAGES: dict[str, Any] = {"page_size": 128, "max_context_len": 256}
OVER_LATENTS = {**LATENT, "num_q_heads": 4, "max_context_len": 256}


def world_on(arch: int) -> AdapterWorld:
    function = FlashAttnCute(arch=arch).flash_attn_varlen_func
    return AdapterWorld(
        library=make,
        kernels=FA4Kernels(flash_attn_varlen_func=function),
        platform=Platform.parse(f"nvidia:sm{arch},cuda=13.0"),
        settings=PAGES,
    )


WORLD = world_on(100)
EMULATED = WORLD.kernels
SM90, SM100 = world_on(90).candidate(FA4), WORLD.candidate(FA4)


@pytest.mark.turns(32)
class TestFA4EmulatedOnSM90(AttentionBackendTests):
    backend = SM90
    page_sizes = (128,)


class TestFA4EmulatedOnSM100(AttentionBackendTests):
    backend = SM100
    page_sizes = (16, 128)


class TestFA4Adapter(EagerAdapterTests):
    adapter = WORLD
    step = extend((140, 5), (0, 3))

    no_graphs = "prefill"


@pytest.mark.parametrize("on", [SM90, SM100], ids=["sm90", "sm100"])
@pytest.mark.parametrize(("head_dim", "v_head_dim"), [(72, 72), (96, 96), (192, 128)])
@pytest.mark.parametrize("save_kv_cache", [True, False])
def test_other_head_dims(on, head_dim, v_head_dim, save_kv_cache) -> None:
    step = extend((140 if save_kv_cache else 0, 16), (0, 7))
    dims = {"head_dim": head_dim, "v_head_dim": v_head_dim, "save_kv_cache": save_kv_cache}
    assert_passes(on, step, lse=True, **dims, **PAGES)


@pytest.mark.parametrize("on", [SM90, SM100], ids=["sm90", "sm100"])
@pytest.mark.parametrize(("num_q_heads", "head_dim"), [(10, 128), (10, 72), (6, 104), (12, 64)])
def test_heads_that_fill_no_tile(on, num_q_heads, head_dim) -> None:
    shape = {"num_q_heads": num_q_heads, "head_dim": head_dim, "v_head_dim": head_dim}
    assert_passes(on, extend((140, 16), (0, 7)), lse=True, **shape, **PAGES)


@pytest.mark.parametrize("num_q_heads", [16, 24])
@pytest.mark.parametrize("page_size", [1, 64, 128])
def test_latent_heads_that_pack_and_that_do_not(num_q_heads, page_size) -> None:
    settings = {**OVER_LATENTS, "num_q_heads": num_q_heads, "page_size": page_size, "lse": True}
    assert_passes(SM100, extend((30, 4), (0, 3)), **settings)


@pytest.mark.parametrize("on", [SM90, SM100], ids=["sm90", "sm100"])
def test_nan_reaches_no_other_request_of_packed_keys(on) -> None:
    step = extend((0, 9), (0, 5), (0, 21))
    assert_passes(on, step, nan_request=1, save_kv_cache=False, **PAGES)


def test_layers_share_a_page_table_and_read_the_pool() -> None:
    kernels, calls = recorded(EMULATED)
    backend, made = WORLD.prepared(extend((140, 5), (0, 3)), kernels=kernels)
    outputs(backend, made)
    pool = backend.context.token_to_kv_pool
    assert len({call.kwargs["page_table"].data_ptr() for call in calls}) == 1
    for call, given in zip(calls, made.inputs, strict=True):
        k, _ = pool.get_kv_buffer(given.layer.layer_id)
        assert call.kwargs["k"].data_ptr() == k.data_ptr()
        assert call.kwargs["v"].shape[1:] == (128, 2, 128)
        assert "cu_seqlens_k" not in call.kwargs


def test_latents_are_read_where_they_lie() -> None:
    kernels, calls = recorded(EMULATED)
    backend, made = WORLD.prepared(extend((30, 4)), kernels=kernels, **OVER_LATENTS)
    outputs(backend, made)
    buffer = backend.context.token_to_kv_pool.get_key_buffer(1)
    call = calls[0].kwargs
    assert call["v"].data_ptr() == buffer.data_ptr()
    assert call["k"].data_ptr() == buffer[..., 512:].data_ptr()
    assert (call["q"].shape[-1], call["qv"].shape[-1]) == (64, 512)


@pytest.mark.parametrize("asked", [True, False])
def test_lse_is_asked_for_where_it_is_wanted(asked) -> None:
    kernels, calls = recorded(EMULATED)
    lse = torch.full((5, 8), torch.nan) if asked else None
    outputs(*WORLD.prepared(extend((9, 5)), kernels=kernels), lse=lse)
    assert [call.kwargs["return_lse"] for call in calls] == [asked, asked]
    assert lse is None or bool(lse.isfinite().all())


def test_rows_of_no_request_are_zero() -> None:
    for out in outputs(*WORLD.prepared(extend((4, 9), (0, 5), trailing=3))):
        assert out[:14].isfinite().all()
        assert not out[14:].any()


def test_no_rows_are_masked_where_the_host_knows_the_lengths() -> None:
    answers = []

    def full_of_nan(**given: Any) -> tuple[torch.Tensor, None]:
        answers.append(given["q"].new_full(given["q"].shape, torch.nan))
        return answers[-1], None

    kernels = FA4Kernels(flash_attn_varlen_func=full_of_nan)
    found = outputs(*WORLD.prepared(extend((4, 9), (0, 5)), kernels=kernels, host_lens=True))
    for out, answer in zip(found, answers, strict=True):
        assert out is answer
        assert out.isnan().all()


def test_arguments_of_a_layer() -> None:
    calls = WORLD.calls(extend((9, 5)), scaling=0.3, logit_cap=2.0, sinks=True)
    first, second = (call.kwargs for call in calls)
    assert (first["softcap"], second["softcap"]) == (2.0, 4.0)
    assert (first["softmax_scale"], second["softmax_scale"]) == (0.3, 0.6)
    assert first["learnable_sink"].dtype == torch.bfloat16
    assert (first["causal"], first["num_splits"]) == (True, 1)
    assert "window_size" not in first


@pytest.mark.parametrize("deterministic", [True, False])
def test_the_longest_request_does_not_count_where_bits_must_not_depend_on_it(deterministic) -> None:
    step = extend((9, 5), (0, 3))
    call, *_ = WORLD.calls(step, deterministic=deterministic, host_lens=True)
    assert call.kwargs["max_seqlen_q"] == (256 if deterministic else 5)


@pytest.mark.parametrize(
    "step",
    [decode(9, 3), verify(2, 9, 3), extend((9, 3), mode=ForwardMode.DRAFT_EXTEND)],
    ids=["decode", "verify", "draft"],
)
def test_steps_that_are_refused(step) -> None:
    WORLD.refuses("^forward_mode: .*EXTEND or MIXED", step, batch={}, kv_in_pool=True)


def test_mixed_steps_are_served() -> None:
    assert_passes(SM90, extend((140, 1), (3, 6), mode=ForwardMode.MIXED), **PAGES)


@pytest.mark.parametrize(
    ("settings", "argument"),
    [
        ({"kv_dtype": "float16"}, "token_to_kv_pool"),
        ({"kv_dtype": "fp8_e4m3"}, "token_to_kv_pool"),
        ({"windows": (None, 8)}, "layer 3"),
        ({"attention_chunk": 16}, "layer 1"),
        ({"is_encoder": True}, "layer 1"),
        ({**OVER_LATENTS, "kv_lora_rank": 64}, "layer 1"),
        ({**OVER_LATENTS, "logit_cap": 30.0}, "layer 1"),
    ],
    ids=["fp16", "fp8", "window", "chunk", "encoder", "rank", "cap-over-latent"],
)
def test_pools_and_layers_that_are_refused(settings, argument) -> None:
    WORLD.refuses(f"^{argument}: ", extend((0, 3)), **settings)


def test_keys_of_another_dtype_are_refused() -> None:
    check_keys_of_another_dtype_are_refused(WORLD, r"k: expected torch\.bfloat16")


def compiled(context: Any) -> list[KernelCall]:
    kernels, calls = recorded(EMULATED)
    replace(make, providers={"ours": lambda: kernels})(context)
    return calls


@pytest.mark.parametrize(
    ("settings", "calls"),
    [({}, 2), ({"lse": True}, 4), ({"logit_cap": 2.0}, 4), ({**OVER_LATENTS, "lse": True}, 4)],
    ids=["plain", "lse", "caps", "latent"],
)
def test_kernels_are_compiled_before_the_first_step(settings, calls) -> None:
    """Of each kind of layers, for steps of one tile of queries and for longer ones."""
    made = compiled(WORLD.world(extend((0, 3)), **settings).context)
    assert len(made) == calls
    assert {call.kwargs["max_seqlen_q"] for call in made} == {1, 256}
    assert all("page_table" in call.kwargs for call in made)


def test_layers_outside_the_pool() -> None:
    """They are compiled for keys of the call."""
    step = extend((0, 9), (0, 4))
    check_layers_outside_the_pool(WORLD, step)
    context = WORLD.world(step).context
    layers = tuple(replace(layer, layer_id=layer.layer_id + 100) for layer in context.layers)
    calls = compiled(replace(context, layers=layers))
    assert {call.kwargs["max_seqlen_q"] for call in calls} == {1, 256}
    assert all("cu_seqlens_k" in each.kwargs and "page_table" not in each.kwargs for each in calls)


@pytest.mark.parametrize("error", [AssertionError, RuntimeError, TypeError])
def test_kernels_that_do_not_compile_here(error) -> None:
    raised = error("Only SM 9.x is supported\nmore lines")
    said = str(WORLD.fails(raised, "flash_attn_varlen_func", step=extend((0, 3))))
    assert re.search(r"Only SM 9\.x is supported.*nvidia-cutlass-dsl", said)
