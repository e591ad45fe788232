"""The adapters on torch-npu's operators in plain torch, under their own schemas."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attnmux.ascend.ascend import make
from attnmux.ascend.cards.ascend import ASCEND
from attnmux.ascend.npu_kernels import load_kernels
from attnmux.core import BackendFailed, InvalidInput, Platform
from attnmux.emulators.ascend import KERNELS
from attnmux.testing import AttentionBackendTests, decode, extend, verify
from attnmux.testing.adapters.tests import (
    LATENT,
    AdapterTests,
    AdapterWorld,
    EagerAdapterTests,
    assert_passes,
    check_layers_outside_the_pool,
    outputs,
)

WORLD = AdapterWorld(
    library=make,
    kernels=KERNELS,
    platform=Platform.parse("ascend:910b"),
    host_lens=True,
    settings={"page_size": 128, "max_context_len": 256},
)
LATENTS = AdapterWorld(
    library=make,
    kernels=KERNELS,
    platform=WORLD.platform,
    host_lens=True,
    settings={**LATENT, "page_size": 16},
)
CANDIDATE = WORLD.candidate(ASCEND)


class TestAscendEmulated(AttentionBackendTests):
    backend = CANDIDATE
    page_sizes = (16, 128)


class UncapturedTests(EagerAdapterTests):
    no_graphs = "takes lengths from the host"


class TestPagesAdapter(AdapterTests):
    adapter = WORLD
    step = extend((140, 3), (0, 9))


class TestPagesInDecode(AdapterTests):
    adapter = WORLD


class TestLatentsAdapter(UncapturedTests):
    adapter = LATENTS
    step = extend((20, 3), (0, 18))


class TestLatentsInDecode(UncapturedTests):
    adapter = LATENTS


@pytest.mark.parametrize("step", [decode(300, 5), extend((400, 3), (0, 50)), verify(3, 390, 5)])
def test_other_dims_and_pages(step) -> None:
    settings = {"page_size": 256, "max_context_len": 600, "spec_topk": 1}
    assert_passes(CANDIDATE, step, head_dim=64, v_head_dim=64, **settings)


def test_the_call_s_own_keys_are_all_keys() -> None:
    check_layers_outside_the_pool(WORLD, extend((0, 5), (0, 4)))
    check_layers_outside_the_pool(LATENTS, extend((0, 21), (0, 4)))


@pytest.mark.parametrize("num_q_heads", [12, 5])
def test_heads_over_latents_are_padded_to_a_power_of_two(num_q_heads) -> None:
    (call, *_) = LATENTS.calls(extend((20, 3)), kv_in_pool=True, num_q_heads=num_q_heads)
    assert call.kwargs["num_query_heads"] in (8, 16)
    settings = {**LATENT, "num_q_heads": num_q_heads, "page_size": 16}
    assert_passes(CANDIDATE, extend((20, 3)), decode(9), **settings)


def test_prompts_over_latents_are_cut_in_chunks() -> None:
    (call, *_) = LATENTS.calls(extend((10, 40), (30, 0), (0, 16)), kv_in_pool=True)
    assert call.kwargs["actual_seq_qlen"] == [16, 32, 40, 56]
    assert call.kwargs["actual_seq_kvlen"] == [26, 42, 50, 16]
    # 4 pages of the first request and 1 of the last, none of one without new tokens.
    assert call.kwargs["key"].shape == (5, 16, 512)
    assert call.kwargs["block_table"].tolist() == [[0, 1, 2, 3]] * 3 + [[4, 0, 0, 0]]


def test_more_chunks_than_the_operator_takes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnmux.ascend.chunks.MOST_REQUESTS", 3)
    with pytest.raises(InvalidInput, match=r"extend_num_tokens: .*fewer tokens"):
        LATENTS.prepared(extend((0, 60)))


def test_more_requests_than_the_operator_takes_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("attnmux.ascend.pages.MOST_REQUESTS", 1)
    with pytest.raises(InvalidInput, match="at most 1 requests"):
        WORLD.prepared(decode(3, 4))


@pytest.mark.parametrize(("world", "is_key"), [(WORLD, "key"), (LATENTS, "key_cache")])
def test_the_pool_is_read_where_it_lies(world, is_key) -> None:
    backend, made = world.prepared(decode(9, 4))
    (call, *_) = world.calls(decode(9, 4), kv_in_pool=True)
    assert call.kwargs[is_key].is_contiguous()
    layer = backend.context.layers[0].layer_id
    pool = backend.context.token_to_kv_pool.get_key_buffer(layer)
    prepared = backend._layers[layer]
    views = prepared.kv if is_key == "key" else (prepared.cache,)
    assert views[0].data_ptr() == pool.data_ptr()
    assert len(outputs(backend, made)) == len(made.inputs)


@pytest.mark.parametrize("world", [WORLD, LATENTS])
@pytest.mark.parametrize(("step", "missing"), [(decode(5), "seq"), (extend((0, 5)), "extend_seq")])
def test_a_batch_without_lengths_on_the_host_is_refused(world, step, missing) -> None:
    setup = world.world(step)
    backend, made = world.backend(setup.context), world.prepare(setup, step)
    without = replace(made.batch, **{f"{missing}_lens_cpu": None})
    with pytest.raises(InvalidInput, match=f"^{missing}_lens_cpu: .* got None"):
        backend.init_forward_metadata(without)


@pytest.mark.parametrize(
    "settings",
    [
        {"head_dim": 96, "v_head_dim": 96},
        {"head_dim": 192, "v_head_dim": 192},
        {"head_dim": 192, "v_head_dim": 128},
        {"page_size": 64},
        {"page_size": 640},
        {"windows": (3,)},
        {"logit_cap": 30.0},
        {"attention_chunk": 16},
        {"num_q_heads": 512, "num_kv_heads": 8},
        {"num_q_heads": 128, "num_kv_heads": 1},
        {"dtype": "float16"},
        {"strided_kv": True},
    ],
)
def test_what_the_operator_does_not_serve_is_refused(settings: dict[str, Any]) -> None:
    world = WORLD.world(decode(5), **{"max_context_len": 1280, **settings})
    with pytest.raises(InvalidInput):
        WORLD.backend(world.context)


@pytest.mark.parametrize(
    "settings",
    [
        {"num_q_heads": 256},
        {"page_size": 64},
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


def test_a_cache_beyond_32_bits_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for world, module in ((WORLD, "pages"), (LATENTS, "latents")):
        monkeypatch.setattr(f"attnmux.ascend.{module}.INT32", 1000)
        with pytest.raises(InvalidInput, match=r"1000 (numbers )?in all"):
            world.backend(world.world(decode(5)).context)


@pytest.mark.parametrize("world", [WORLD, LATENTS])
def test_a_request_without_keys_reads_nothing_of_the_reserved_page(world) -> None:
    backend, made = world.prepared(decode(0, 9))
    layer = made.inputs[0].layer.layer_id
    backend.context.token_to_kv_pool.get_key_buffer(layer)[:16] = 1
    first, *_ = outputs(backend, made)
    assert not first[0].any()
    assert first[1].any()


@pytest.mark.parametrize("world", [WORLD, LATENTS])
def test_rows_of_no_request_are_zero(world) -> None:
    backend, made = world.prepared(extend((9, 3), trailing=2))
    for given, plain in zip(made.inputs, outputs(backend, made), strict=True):
        out = torch.full_like(plain, torch.nan)
        one = replace(made, inputs=(given,))
        assert outputs(backend, one, out=out)[0] is out
        assert torch.equal(out, plain)
        assert not out[3:].any()


def test_trees_are_refused() -> None:
    for world in (WORLD, LATENTS):
        with pytest.raises(InvalidInput, match="custom_mask"):
            world.prepared(verify(3, 9), spec_topk=2)


def test_an_lse_that_the_operators_do_not_give_is_refused() -> None:
    for world, settings in ((WORLD, {"sinks": True}), (LATENTS, {})):
        backend, made = world.prepared(decode(5), **settings)
        with pytest.raises(InvalidInput, match=r"^lse: "):
            outputs(backend, made, lse=torch.empty(1, made.inputs[0].q.shape[1]))


def test_the_operators_are_those_of_torch_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("npu_fused_infer_attention_score_v2", "_npu_paged_attention_mla")
    functions = [lambda *_: None, lambda *_: None, lambda *_: None]
    module = SimpleNamespace(**dict(zip(names, functions, strict=False)))
    module.atb, module.npu = SimpleNamespace(npu_ring_mla=functions[-1]), SimpleNamespace()
    monkeypatch.setitem(sys.modules, "torch_npu", module)
    kernels = load_kernels()
    assert [
        kernels.fused_infer_attention_score,
        kernels.paged_attention_mla,
        kernels.ring_mla,
    ] == functions
    del module._npu_paged_attention_mla
    with pytest.raises(BackendFailed, match="torch-npu: AttributeError"):
        make(WORLD.world(decode(5)).context)


def test_without_torch_npu_it_says_how_to_get_it() -> None:
    with pytest.raises(BackendFailed, match=r"torch-npu: .*pip install 'attnmux-ascend\[npu\]'"):
        make(WORLD.world(decode(5)).context)
