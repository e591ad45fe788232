"""The adapters on sgl-kernel-xpu's operators in plain torch, under their own schemas."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from attnmux.core import BackendFailed, InvalidInput, Platform
from attnmux.emulators.intel.xpu import KERNELS
from attnmux.intel.cards.intel_xpu import INTEL_XPU
from attnmux.intel.xpu import make
from attnmux.testing import AttentionBackendTests, decode, extend, verify
from attnmux.testing.adapters.tests import (
    LATENT,
    AdapterWorld,
    EagerAdapterTests,
    assert_passes,
    check_layers_outside_the_pool,
    outputs,
)

WORLD = AdapterWorld(
    library=make,
    kernels=KERNELS,
    platform=Platform.parse("intel:xe2"),
    host_lens=True,
    settings={"page_size": 64, "max_context_len": 256},
)
LATENTS = AdapterWorld(
    library=make,
    kernels=KERNELS,
    platform=WORLD.platform,
    host_lens=True,
    settings={**LATENT, "page_size": 16, "max_context_len": 256},
)
CANDIDATE = WORLD.candidate(INTEL_XPU)


class TestXPUEmulated(AttentionBackendTests):
    backend = CANDIDATE
    page_sizes = (16, 64)


class UncapturedTests(EagerAdapterTests):
    no_graphs = "graphs"


class TestPagesAdapter(UncapturedTests):
    adapter = WORLD
    step = extend((140, 3), (0, 9))


class TestLatentsAdapter(UncapturedTests):
    adapter = LATENTS
    step = extend((20, 3), (0, 18))


class TestLatentsInDecode(UncapturedTests):
    adapter = LATENTS


@pytest.mark.parametrize("step", [decode(150, 5), extend((140, 3), (0, 50), (9, 1))])
@pytest.mark.parametrize("head_dim", [64, 96, 192, 256, 512])
def test_other_dims(step, head_dim) -> None:
    settings = {"page_size": 128, "max_context_len": 256, "num_q_heads": 4}
    assert_passes(CANDIDATE, step, head_dim=head_dim, v_head_dim=head_dim, **settings)


@pytest.mark.parametrize("page_size", [32, 128])
def test_latents_over_other_pages(page_size) -> None:
    settings = {**LATENT, "page_size": page_size, "max_context_len": 256}
    assert_passes(CANDIDATE, extend((140, 3), (0, 21)), decode(9, 130), **settings)


def test_the_call_s_own_keys_are_all_keys() -> None:
    check_layers_outside_the_pool(WORLD, extend((0, 5), (0, 1), (0, 70)))
    check_layers_outside_the_pool(LATENTS, extend((0, 21), (0, 4)))


def test_requests_without_new_tokens_are_left_out() -> None:
    (call, *_) = WORLD.calls(extend((9, 3), (5, 0), (70, 1), (4, 0)), kv_in_pool=True)
    assert call.kwargs["cu_seqlens_q"].tolist() == [0, 3, 4]
    assert call.kwargs["cu_seqlens_k"].tolist() == [12, 71]
    assert len(call.kwargs["page_table"]) == 2
    (call, *_) = LATENTS.calls(extend((5, 0), (9, 3)), kv_in_pool=True)
    assert call.kwargs["seq_lens"].tolist() == [12]
    assert_passes(CANDIDATE, extend((9, 3), (5, 0), (70, 1)), page_size=64, max_context_len=256)


def test_steps_of_single_tokens_run_the_kernels_for_decode() -> None:
    (call, *_) = WORLD.calls(extend((9, 1), (5, 0)), kv_in_pool=True)
    assert call.kwargs["max_seqlen_q"] == 1


def test_keys_are_split_unless_results_must_not_depend_on_the_batch() -> None:
    for deterministic, splits in ((False, 0), (True, 1)):
        (call, *_) = WORLD.calls(decode(9), kv_in_pool=True, deterministic=deterministic)
        assert call.kwargs["num_kv_splits"] == splits


def test_the_largest_tile_of_prefill_is_never_taken() -> None:
    """Its kernel loses the device where another request ends within a tile."""
    settings = {"num_q_heads": 1, "max_context_len": 1100, "windows": (None,)}
    step = extend((600, 0), (0, 512), (600, 5))
    (call, *_) = LATENTS.calls(step, kv_in_pool=True, **settings)
    assert call.kwargs["max_seqlen_q"] == 513
    assert len(call.kwargs["out"]) == 768


@pytest.mark.parametrize("world", [WORLD, LATENTS])
def test_the_pool_is_read_where_it_lies(world) -> None:
    backend, _ = world.prepared(decode(9, 4))
    layer = backend.context.layers[0].layer_id
    prepared = backend._layers[layer]
    views = [prepared.cache] if world is LATENTS else prepared.kv
    assert views[0].data_ptr() == backend.context.token_to_kv_pool.get_key_buffer(layer).data_ptr()


@pytest.mark.parametrize("world", [WORLD, LATENTS])
def test_a_batch_without_lengths_on_the_host_is_refused(world) -> None:
    setup = world.world(extend((0, 5)))
    backend, made = world.backend(setup.context), world.prepare(setup, extend((0, 5)))
    with pytest.raises(InvalidInput, match=r"^extend_seq_lens_cpu: .* got None"):
        backend.init_forward_metadata(replace(made.batch, extend_seq_lens_cpu=None))


@pytest.mark.parametrize("world", [WORLD, LATENTS])
def test_drafts_and_an_lse_are_refused(world) -> None:
    with pytest.raises(InvalidInput, match="TARGET_VERIFY"):
        world.prepared(verify(3, 9), spec_topk=1)
    backend, made = world.prepared(decode(5))
    with pytest.raises(InvalidInput, match=r"^lse: .*the kernels write none"):
        outputs(backend, made, lse=torch.empty(1, made.inputs[0].q.shape[1]))


@pytest.mark.parametrize(
    "settings",
    [
        {"head_dim": 80, "v_head_dim": 80},
        {"head_dim": 192, "v_head_dim": 128},
        {"sinks": True},
        {"page_size": 32},
        {"logit_cap": 30.0},
        {"attention_chunk": 16},
        {"num_q_heads": 32, "num_kv_heads": 1},
        {"dtype": "float32"},
    ],
)
def test_what_the_kernels_do_not_serve_is_refused(settings: dict[str, Any]) -> None:
    world = WORLD.world(decode(5), **settings)
    with pytest.raises(InvalidInput):
        WORLD.backend(world.context)


@pytest.mark.parametrize(
    "settings",
    [
        {"num_q_heads": 256},
        {"page_size": 8},
        {"kv_lora_rank": 256},
        {"sinks": True},
        {"strided_kv": True},
        {"dtype": "float32"},
    ],
)
def test_latents_that_are_refused(settings: dict[str, Any]) -> None:
    world = LATENTS.world(decode(5), **settings)
    with pytest.raises(InvalidInput):
        LATENTS.backend(world.context)


@pytest.mark.parametrize("world", [WORLD, LATENTS])
def test_rows_without_keys_or_requests_are_zero(world) -> None:
    for step, zero in ((decode(0, 9), slice(1)), (extend((9, 3), trailing=2), slice(3, None))):
        backend, made = world.prepared(step)
        given = made.inputs[0]
        backend.context.token_to_kv_pool.get_key_buffer(given.layer.layer_id)[:16] = 1
        out = torch.full((made.batch.num_tokens, *given.q.shape[1:]), torch.nan).to(given.q.dtype)
        outputs(backend, replace(made, inputs=(given,)), out=out)
        assert out.isfinite().all()
        assert not out[zero].any()
        assert out.any()


def test_float16_of_a_layer_outside_the_pool_is_refused() -> None:
    for world in (WORLD, LATENTS):
        setup = world.world(decode(5), kv_in_pool=True)
        backend, made = world.backend(setup.context), world.prepare(setup, decode(5))
        backend.init_forward_metadata(made.batch)
        given = made.inputs[0]
        q, rope = given.q.half(), None if given.q_rope is None else given.q_rope.half()
        with pytest.raises(InvalidInput, match=r"^q: .*float16"):
            backend.forward(q, None, None, given.layer, made.batch, q_rope=rope)


def test_without_the_library_it_says_how_to_build_it() -> None:
    with pytest.raises(BackendFailed, match=r"sgl-kernel: .*pip install git\+https://"):
        make(WORLD.world(decode(5)).context)


def call_of_fwd(**changes: Any) -> dict[str, Any]:
    (call, *_) = WORLD.calls(extend((9, 3), (70, 1)), kv_in_pool=True, dtype="bfloat16")
    return {**call.kwargs, **changes}


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"no_such": 1}, "received 30 argument"),
        ({"cu_seqlens_q": torch.tensor([0, 3, 3], dtype=torch.int32)}, "written over"),
        ({"cu_seqlens_q": torch.tensor([0, 3, 4])}, "int32"),
        ({"cu_seqlens_k": torch.tensor([12, 999], dtype=torch.int32)}, "max_seqlen_k"),
        ({"max_seqlen_q": 2}, "max_seqlen_q"),
        ({"page_table": None}, "without pages"),
        ({"sinks": torch.zeros(8)}, "head_size == 64"),
        ({"q": torch.zeros(4, 8, 128)}, "Half and BFloat16"),
        ({"q": torch.zeros(4, 8, 256).bfloat16()[..., :128]}, "end to end"),
    ],
)
def test_what_the_emulated_operator_refuses(changes, match) -> None:
    with pytest.raises(RuntimeError, match=match):
        KERNELS.fwd(**call_of_fwd(**changes))


def test_the_emulated_cap_and_lse_do_nothing() -> None:
    given = call_of_fwd(out=None)
    (plain, lse, *_), (capped, *_) = (KERNELS.fwd(**{**given, "softcap": c}) for c in (0.0, 1.0))
    assert torch.equal(plain, capped)
    assert lse.isnan().all()
