"""Dual chunk attention on the emulator of sgl_kernel that test_sgl_flash_attn compares with it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from attnmux.core import MultiItem, Platform
from attnmux.core.composites.virtual_requests import most_pieces
from attnmux.core.plugin import KernelLibrary, Pieces
from attnmux.nvidia.cards.dual_chunk_flash_attn import DUAL_CHUNK_FLASH_ATTN
from attnmux.nvidia.fa3.dual_chunk import DualChunkKernels, make, merge
from attnmux.nvidia.fa3.dual_chunk_regions import longest_keys, regions_of
from attnmux.testing import (
    AttentionBackendTests,
    decode,
    extend,
    prepare_step,
    reference,
    verify,
)
from attnmux.testing.adapters.tests import (
    AdapterTests,
    AdapterWorld,
    assert_passes,
    check_graphs_side_by_side,
    check_layers_outside_the_pool,
    misaligned,
    outputs,
    recorded,
)

EMULATED = KernelLibrary.imported(DualChunkKernels, "attnmux.emulators.nvidia.sgl_flash_attn")
HOPPER = Platform.parse("nvidia:sm90,cuda=13.0")
CHUNKS: dict[str, Any] = {"kind": "dual_chunk", "dual_chunk_len": 32}
WORLD = AdapterWorld(
    library=make, kernels=EMULATED, platform=HOPPER, settings={**CHUNKS, "max_context_len": 256}
)
CANDIDATE = WORLD.candidate(DUAL_CHUNK_FLASH_ATTN)
ONE_LAYER = (None,)


class TestDualChunkEmulated(AttentionBackendTests):
    backend = CANDIDATE
    page_sizes = (16,)


class TestDualChunkAdapter(AdapterTests):
    adapter = WORLD


@pytest.mark.parametrize("head_dim", [96, 192, 256])
@pytest.mark.parametrize("step", [decode(75, 3), extend((0, 71), (16, 7))])
def test_other_head_dims(head_dim, step):
    dims = {"head_dim": head_dim, "v_head_dim": head_dim, "page_size": 16, "lse": True}
    assert_passes(CANDIDATE, step, **CHUNKS, **dims)


def test_each_query_meets_its_own_keys():
    calls = [call.kwargs for call in WORLD.calls(decode(5, 40, 70, 200), windows=ONE_LAYER)]
    assert [call["cache_seqlens"].tolist() for call in calls] == [
        [5, 8, 6, 8],
        [0, 32, 32, 32],
        [0, 0, 32, 160],
    ]
    assert [call["causal"] for call in calls] == [True, False, False]
    assert all("cu_seqlens_q" not in call for call in calls)


@pytest.mark.parametrize(
    ("longest", "host_lens", "calls"), [(32, True, 1), (33, True, 2), (65, True, 3), (5, False, 3)]
)
def test_queries_that_no_request_needs_are_left_out(longest, host_lens, calls):
    made = WORLD.calls(decode(longest, 3), windows=ONE_LAYER, host_lens=host_lens)
    assert len(made) == calls


@pytest.mark.parametrize("max_context_len", [32, 64, 65])
def test_a_context_of_few_chunks(max_context_len):
    steps = decode(32, 7), extend((0, 32), (9, 4))
    settings = {"max_context_len": max_context_len, "lse": True, "graph": True}
    assert_passes(CANDIDATE, *steps, **CHUNKS, **settings)


@pytest.mark.parametrize("step", [decode(20, 3), extend((0, 20), (4, 9))])
def test_one_region_is_written_where_the_caller_wants_it(step):
    kernels, calls = recorded(EMULATED)
    settings = {"windows": ONE_LAYER, "host_lens": True}
    backend, made = WORLD.prepared(step, kernels=kernels, **settings)
    q = made.inputs[0].q
    out = q.new_empty((*q.shape[:2], 128))
    assert outputs(backend, made, out=out)[0] is out
    assert calls[0].kwargs["out"].data_ptr() == out.data_ptr()


@pytest.mark.parametrize(("page_size", "chunk_len", "seen"), [(16, 32, 16), (16, 24, 1), (1, 7, 1)])
def test_chunks_that_begin_in_mid_page_are_read_by_slots(page_size, chunk_len, seen):
    call, *_ = WORLD.calls(decode(60, 3), page_size=page_size, dual_chunk_len=chunk_len)
    assert call.kwargs["page_table"].shape[1] == -(-chunk_len // seen)


@pytest.mark.parametrize("host_lens", [True, False])
def test_requests_without_keys(host_lens):
    backend, made = WORLD.prepared(decode(0, 0), windows=ONE_LAYER, host_lens=host_lens)
    lse = torch.zeros(made.inputs[0].q.shape[:2])
    (out,) = outputs(backend, made, lse=lse)
    assert not out.any()
    assert lse.isneginf().all()


def test_layers_of_one_chunk_length_share_their_tables():
    tables = [call.kwargs["page_table"].data_ptr() for call in WORLD.calls(decode(70, 3))]
    assert tables[:3] == tables[3:]
    assert len(set(tables)) == 3


def test_layers_of_two_chunk_lengths():
    step = extend((0, 70), (40, 9))
    world = WORLD.world(step)
    first, second = world.context.layers
    layers = (first, replace(second, dual_chunk_len=20))
    context = replace(world.context, layers=layers)
    backend, made = WORLD.backend(context), prepare_step(world, step)
    backend.init_forward_metadata(made.batch)
    for layer, given in zip(layers, made.inputs, strict=True):
        out = backend.forward(given.q, given.k, given.v, layer, made.batch)
        table, pool = context.req_to_token_pool.req_to_token, context.token_to_kv_pool
        expected, _ = reference.attention(given.q, layer, made.batch, table, pool)
        torch.testing.assert_close(out.double(), expected, rtol=0.02, atol=0.02)


def test_pieces_by_hand():
    step = extend((30, 40), (0, 0), (64, 1))
    batch = prepare_step(WORLD.world(step), step).batch
    pieces = Pieces.of(batch, 32)
    assert len(pieces.rows) == most_pieces(batch, 32) == 8
    assert pieces.query_bounds.tolist() == [0, 2, 34, 40, 41, 41, 41, 41, 41]
    assert pieces.chunks.tolist() == [0, 1, 2, 2, 0, 0, 0, 0]
    assert pieces.ends.tolist() == [32, 64, 70, 65, 0, 0, 0, 0]
    rows = batch.req_pool_indices
    assert pieces.rows[:4].tolist() == [rows[0], rows[0], rows[0], rows[2]]
    own, before, rest = regions_of(pieces)
    assert own[0].tolist()[:4] == [0, 32, 64, 64]
    assert own[1].tolist()[:4] == [32, 32, 6, 1]
    assert before[0].tolist()[:4] == [0, 0, 32, 32]
    assert before[1].tolist()[:4] == [0, 32, 32, 32]
    assert rest[1].tolist()[:4] == [0, 0, 32, 32]


@pytest.mark.parametrize("chunk_len", [1, 2, 7, 32])
def test_there_are_always_enough_pieces(chunk_len):
    generator = torch.Generator().manual_seed(chunk_len)
    for _ in range(20):
        drawn = torch.randint(0, 60, (5, 2), generator=generator).tolist()
        step = extend(*((cached, new) for cached, new in drawn))
        world = WORLD.world(step, windows=ONE_LAYER, head_dim=8, v_head_dim=8)
        batch = prepare_step(world, step).batch
        pieces = Pieces.of(batch, chunk_len)
        lens = pieces.query_bounds.diff()
        assert not pieces.ends[-1]
        assert int(lens[-1]) == 0
        assert int(lens.sum()) == batch.num_tokens
        assert int(lens.max()) <= chunk_len


@pytest.mark.parametrize(
    ("longest", "most"),
    [(0, (0,)), (32, (32,)), (33, (32, 32)), (64, (32, 32)), (97, (32, 32, 64))],
)
def test_longest_keys(longest, most):
    assert longest_keys(32, longest) == most


def test_merging_is_one_softmax():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 4, 16), torch.randn(9, 2, 16), torch.randn(9, 2, 16)
    whole = torch.ones(3, 9, dtype=torch.bool)
    expected, expected_lse = reference.dense_attention(q, k, v, whole, scaling=0.3)
    parts = [(0, 4), (4, 4), (4, 9)]
    states = [
        reference.dense_attention(q, k[a:b], v[a:b], whole[:, a:b], scaling=0.3) for a, b in parts
    ]
    out, lse = merge([out.float() for out, _ in states], [lse.float() for _, lse in states])
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)


def test_merging_of_nothing():
    out, lse = merge([torch.zeros(1, 2, 4)] * 3, [torch.full((1, 2), -torch.inf)] * 3)
    assert not out.any()
    assert lse.isneginf().all()


def test_misaligned_queries_are_copied():
    kernels, calls = recorded(EMULATED)
    backend, made = WORLD.prepared(extend((0, 70), (4, 9)), kernels=kernels, windows=ONE_LAYER)
    given = replace(made.inputs[0], q=misaligned(made.inputs[0].q))
    outputs(backend, replace(made, inputs=(given,)))
    assert all(call.args[0].data_ptr() % 16 == 0 for call in calls)


def test_graphs_live_side_by_side():
    check_graphs_side_by_side(WORLD, decode(40, 7), decode(3, 90, 21))


def test_layers_outside_the_pool():
    check_layers_outside_the_pool(WORLD, extend((0, 70), (0, 9)))


@pytest.mark.parametrize(
    "changes",
    [
        {"kind": "mha", "dual_chunk_len": 0},
        {"sliding_window_size": 8},
        {"attention_chunk_size": 16},
        {"logit_cap": 2.0},
        {"sinks": torch.zeros(8)},
        {"is_causal": False},
        {"is_cross_attention": True},
        {"v_head_dim": 64},
    ],
)
def test_layers_that_are_refused(changes):
    WORLD.refuses("layer 1: expected", decode(5), layer=changes, windows=ONE_LAYER)


def test_8_bit_pools_are_refused():
    WORLD.refuses("token_to_kv_pool", decode(5), kv_dtype="fp8_e4m3")


NOTHING = torch.zeros(1, dtype=torch.int32)


@pytest.mark.parametrize(
    ("step", "fields", "argument"),
    [
        (verify(3, 9, 20), {}, "forward_mode"),
        (
            decode(5),
            {"multi_item": MultiItem(prefix_lens=NOTHING, token_pos_in_items=NOTHING)},
            "multi_item",
        ),
        (decode(5), {"encoder_lens": NOTHING}, "encoder_lens"),
    ],
)
def test_steps_that_are_refused(step, fields, argument):
    WORLD.refuses(f"^{argument}: ", step, batch=fields, spec_topk=1)


def test_only_decode_is_captured():
    WORLD.captures_no("EXTEND steps cannot be captured", extend((40, 9), (0, 4)))
