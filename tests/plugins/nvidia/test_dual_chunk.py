"""Dual chunk attention on the emulator of sgl_kernel that test_sgl_flash_attn compares with it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from attnmux.core.batch import MultiItem
from attnmux.core.choosing.platform import Platform
from attnmux.core.errors import AttnmuxError, BackendFailed, GraphUnsupported, InvalidInput
from attnmux.emulators.nvidia import sgl_flash_attn
from attnmux.nvidia.cards.dual_chunk_flash_attn import DUAL_CHUNK_FLASH_ATTN
from attnmux.nvidia.dual_chunk import DualChunkBackend, Kernels
from attnmux.nvidia.dual_chunk.merging import merged
from attnmux.nvidia.dual_chunk.pieces import Pieces, longest_keys, most_pieces
from attnmux.nvidia.dual_chunk.trial import try_kernels
from attnmux.testing import (
    AttentionBackendTests,
    Candidate,
    Case,
    World,
    make_world,
    prepare_step,
    reference,
    run_case,
)
from attnmux.testing.cases import Step, decode, extend, verify

EMULATED = Kernels(flash_attn_with_kvcache=sgl_flash_attn.flash_attn_with_kvcache)

CANDIDATE = Candidate(
    card=replace(DUAL_CHUNK_FLASH_ATTN, status="available", requires=()),
    platform=Platform.parse("nvidia:sm90,cuda=13.0"),
    device="cpu",
    factory=lambda context, options: DualChunkBackend(context, options, EMULATED),
)


class TestDualChunkEmulated(AttentionBackendTests):
    backend = CANDIDATE
    page_sizes = (16,)


class Spy:
    """Kernels that note what they are called with."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.kernels = Kernels(flash_attn_with_kvcache=self._noted)

    def _noted(self, q, k_cache, v_cache, **arguments):
        self.calls.append({"q": q, **arguments})
        return sgl_flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, **arguments)


def world_of(*steps: Step, **settings: Any) -> World:
    chunks = {"kind": "dual_chunk", "dual_chunk_len": 32, "max_context_len": 256}
    case = Case(name="of-this-test", steps=steps, **{**chunks, **settings})
    return make_world(case, CANDIDATE.platform, "cpu")


def run(
    world: World, kernels: Kernels, step: Step, *, given_out: bool = False, **prepared: Any
) -> list[torch.Tensor]:
    """The output of each layer."""
    backend = DualChunkBackend(world.context, {}, kernels)
    made = prepare_step(world, step, **prepared)
    backend.init_forward_metadata(made.batch)
    results = []
    for given in made.inputs:
        out = None
        if given_out:
            out = given.q.new_empty((*given.q.shape[:2], given.layer.v_head_dim))
        result = backend.forward(given.q, given.k, given.v, given.layer, made.batch, out=out)
        assert out is None or result is out
        results.append(result)
    return results


@pytest.mark.parametrize("head_dim", [96, 192, 256])
@pytest.mark.parametrize("step", [decode(75, 3), extend((0, 71), (16, 7))])
def test_other_head_dims(head_dim, step):
    case = Case(
        name="dim",
        steps=(step,),
        kind="dual_chunk",
        dual_chunk_len=32,
        head_dim=head_dim,
        v_head_dim=head_dim,
        page_size=16,
        lse=True,
    )
    outcome = run_case(CANDIDATE, case)
    assert outcome.status == "passed", outcome.message


def test_each_query_meets_its_own_keys():
    step = decode(5, 40, 70, 200)
    spy, world = Spy(), world_of(step, windows=(None,))
    run(world, spy.kernels, step)
    assert [call["cache_seqlens"].tolist() for call in spy.calls] == [
        [5, 8, 6, 8],
        [0, 32, 32, 32],
        [0, 0, 32, 160],
    ]
    assert [call["causal"] for call in spy.calls] == [True, False, False]
    assert all("cu_seqlens_q" not in call for call in spy.calls)


@pytest.mark.parametrize(
    ("longest", "host_lens", "calls"), [(32, True, 1), (33, True, 2), (65, True, 3), (5, False, 3)]
)
def test_queries_that_no_request_needs_are_left_out(longest, host_lens, calls):
    step = decode(longest, 3)
    spy, world = Spy(), world_of(step, windows=(None,))
    run(world, spy.kernels, step, host_lens=host_lens)
    assert len(spy.calls) == calls


@pytest.mark.parametrize("max_context_len", [32, 64, 65])
def test_a_context_of_few_chunks(max_context_len):
    case = Case(
        name="short",
        steps=(decode(32, 7), extend((0, 32), (9, 4))),
        kind="dual_chunk",
        dual_chunk_len=32,
        max_context_len=max_context_len,
        lse=True,
        graph=True,
    )
    outcome = run_case(CANDIDATE, case)
    assert outcome.status == "passed", outcome.message


@pytest.mark.parametrize("step", [decode(20, 3), extend((0, 20), (4, 9))])
def test_one_region_is_written_where_the_caller_wants_it(step):
    spy, world = Spy(), world_of(step, windows=(None,))
    (result,) = run(world, spy.kernels, step, given_out=True, host_lens=True)
    assert spy.calls[0]["out"].data_ptr() == result.data_ptr()


@pytest.mark.parametrize(("page_size", "chunk_len", "seen"), [(16, 32, 16), (16, 24, 1), (1, 7, 1)])
def test_chunks_that_begin_in_mid_page_are_read_by_slots(page_size, chunk_len, seen):
    step = decode(60, 3)
    world = world_of(step, page_size=page_size, dual_chunk_len=chunk_len)
    spy = Spy()
    run(world, spy.kernels, step)
    assert spy.calls[0]["page_table"].shape[1] == -(-chunk_len // seen)


@pytest.mark.parametrize("host_lens", [True, False])
def test_requests_without_keys(host_lens):
    step = decode(0, 0)
    world = world_of(step, windows=(None,))
    backend, made = DualChunkBackend(world.context, {}, EMULATED), prepare_step(world, step)
    batch = replace(made.batch, seq_lens_cpu=made.batch.seq_lens.clone() if host_lens else None)
    backend.init_forward_metadata(batch)
    given = made.inputs[0]
    lse = torch.zeros(given.q.shape[:2])
    out = backend.forward(given.q, None, None, given.layer, batch, lse=lse)
    assert not out.any()
    assert lse.isneginf().all()


def test_layers_of_one_chunk_length_share_their_tables():
    step = decode(70, 3)
    spy, world = Spy(), world_of(step)
    run(world, spy.kernels, step)
    tables = [call["page_table"].data_ptr() for call in spy.calls]
    assert tables[:3] == tables[3:]
    assert len(set(tables)) == 3


def test_layers_of_two_chunk_lengths():
    step = extend((0, 70), (40, 9))
    world = world_of(step)
    first, second = world.context.layers
    layers = (first, replace(second, dual_chunk_len=20))
    context = replace(world.context, layers=layers)
    backend, made = DualChunkBackend(context, {}, EMULATED), prepare_step(world, step)
    backend.init_forward_metadata(made.batch)
    for layer, given in zip(layers, made.inputs, strict=True):
        out = backend.forward(given.q, given.k, given.v, layer, made.batch)
        table, pool = context.req_to_token_pool.req_to_token, context.token_to_kv_pool
        expected, _ = reference.attention(given.q, layer, made.batch, table, pool)
        torch.testing.assert_close(out.double(), expected, rtol=0.02, atol=0.02)


def test_pieces_by_hand():
    step = extend((30, 40), (0, 0), (64, 1))
    batch = prepare_step(world_of(step), step).batch
    pieces = Pieces.of(batch, 32)
    assert len(pieces.rows) == most_pieces(batch, 32) == 8
    assert pieces.query_bounds.tolist() == [0, 2, 34, 40, 41, 41, 41, 41, 41]
    assert pieces.chunks.tolist() == [0, 1, 2, 2, 0, 0, 0, 0]
    assert pieces.ends.tolist() == [32, 64, 70, 65, 0, 0, 0, 0]
    rows = batch.req_pool_indices
    assert pieces.rows[:4].tolist() == [rows[0], rows[0], rows[0], rows[2]]
    own, before, rest = pieces.keys()
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
        world = world_of(step, windows=(None,), head_dim=8, v_head_dim=8)
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
    out, lse = merged([out.float() for out, _ in states], [lse.float() for _, lse in states])
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)


def test_merging_of_nothing():
    out, lse = merged([torch.zeros(1, 2, 4)] * 3, [torch.full((1, 2), -torch.inf)] * 3)
    assert not out.any()
    assert lse.isneginf().all()


def test_misaligned_queries_are_copied():
    step = extend((0, 70), (4, 9))
    spy, world = Spy(), world_of(step, windows=(None,))
    backend, made = DualChunkBackend(world.context, {}, spy.kernels), prepare_step(world, step)
    given = made.inputs[0]
    rows = torch.empty(given.q.numel() + 1, dtype=given.q.dtype)[1:].view(given.q.shape)
    rows.copy_(given.q)
    backend.init_forward_metadata(made.batch)
    backend.forward(rows, given.k, given.v, given.layer, made.batch)
    assert all(call["q"].data_ptr() % 16 == 0 for call in spy.calls)


@pytest.mark.parametrize(
    ("changes", "argument"),
    [
        ({"kind": "mha", "dual_chunk_len": 0}, "layer 1"),
        ({"sliding_window_size": 8}, "layer 1"),
        ({"attention_chunk_size": 16}, "layer 1"),
        ({"logit_cap": 2.0}, "layer 1"),
        ({"sinks": torch.zeros(8)}, "layer 1"),
        ({"is_causal": False}, "layer 1"),
        ({"is_cross_attention": True}, "layer 1"),
        ({"v_head_dim": 64}, "layer 1"),
    ],
)
def test_refuses_layers_that_it_does_not_serve(changes, argument):
    context = world_of(decode(5), windows=(None,)).context
    context = replace(context, layers=(replace(context.layers[0], **changes),))
    with pytest.raises(InvalidInput) as refusal:
        DualChunkBackend(context, {}, EMULATED)
    assert refusal.value.argument == argument


def test_refuses_8_bit_pools():
    world = world_of(decode(5), kv_dtype="fp8_e4m3")
    with pytest.raises(InvalidInput, match="token_to_kv_pool"):
        DualChunkBackend(world.context, {}, EMULATED)


def test_refuses_steps_that_it_does_not_serve():
    step = verify(3, 9, 20)
    world = world_of(step, spec_topk=1)
    backend = DualChunkBackend(world.context, {}, EMULATED)
    batch = prepare_step(world, step).batch
    with pytest.raises(InvalidInput, match="forward_mode"):
        backend.init_forward_metadata(batch)
    batch = prepare_step(world_of(decode(5)), decode(5)).batch
    nothing = torch.zeros(1, dtype=torch.int32)
    items = MultiItem(prefix_lens=nothing, token_pos_in_items=nothing)
    with pytest.raises(InvalidInput, match="multi_item"):
        backend.init_forward_metadata(replace(batch, multi_item=items))
    with pytest.raises(InvalidInput, match="encoder_lens"):
        backend.init_forward_metadata(replace(batch, encoder_lens=nothing))


def test_a_step_has_to_be_prepared():
    step = decode(5)
    world = world_of(step)
    given, batch = prepare_step(world, step).inputs[0], prepare_step(world, step).batch
    backend = DualChunkBackend(world.context, {}, EMULATED)
    with pytest.raises(AttnmuxError, match="no step is prepared"):
        backend.forward(given.q, given.k, given.v, given.layer, batch)


def test_a_capture_needs_buffers():
    step = decode(5, 9)
    world = world_of(step)
    backend = DualChunkBackend(world.context, {}, EMULATED)
    backend.init_cuda_graph_state(1, 1)
    with pytest.raises(GraphUnsupported, match="buffers for 1"):
        backend.init_forward_metadata_out_graph(prepare_step(world, step).batch, in_capture=True)


def test_captures_are_of_decode():
    step = extend((40, 9), (0, 4))
    world = world_of(step)
    backend = DualChunkBackend(world.context, {}, EMULATED)
    backend.init_cuda_graph_state(16, 16)
    with pytest.raises(GraphUnsupported, match="EXTEND is captured by no graph"):
        backend.init_forward_metadata_out_graph(prepare_step(world, step).batch, in_capture=True)


def test_trial():
    context = world_of(decode(5)).context
    try_kernels(EMULATED, context)

    def no_image(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no kernel image is available for execution on the device")

    with pytest.raises(BackendFailed, match="no kernel image"):
        try_kernels(Kernels(flash_attn_with_kvcache=no_image), context)
