from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from attnmux.core.batch import ForwardMode, MultiItem
from attnmux.core.choosing.conditions import ANY
from attnmux.core.choosing.platform import Platform
from attnmux.core.errors import AttnmuxError, BackendFailed, GraphUnsupported, InvalidInput
from attnmux.core.graph.devices import GraphStep
from attnmux.core.kv import MHATokenToKVPool
from attnmux.emulators.nvidia import sgl_flash_attn
from attnmux.nvidia.cards.fa3 import FA3
from attnmux.nvidia.fa3 import FA3Backend, Kernels
from attnmux.nvidia.fa3.trial import try_kernels
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
from attnmux.testing.recording import RecordingGraphs

EMULATED = Kernels(
    flash_attn_with_kvcache=sgl_flash_attn.flash_attn_with_kvcache,
    flash_attn_varlen_func=sgl_flash_attn.flash_attn_varlen_func,
    get_scheduler_metadata=sgl_flash_attn.get_scheduler_metadata,
    merge_state_v2=sgl_flash_attn.merge_state_v2,
)

CANDIDATE = Candidate(
    card=replace(FA3, requires=()),
    platform=Platform.parse("nvidia:sm90,cuda=13.0"),
    device="cpu",
    factory=lambda context, options: FA3Backend(context, options, EMULATED),
)


class TestFA3Emulated(AttentionBackendTests):
    backend = CANDIDATE
    page_sizes = (1, 16)


class Spy:
    """Kernels that note what they are called with."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.schedules: list[dict[str, Any]] = []
        self.kernels = Kernels(
            flash_attn_with_kvcache=self._noting(sgl_flash_attn.flash_attn_with_kvcache),
            flash_attn_varlen_func=self._noting(sgl_flash_attn.flash_attn_varlen_func),
            get_scheduler_metadata=self._noting(
                sgl_flash_attn.get_scheduler_metadata, self.schedules
            ),
            merge_state_v2=self._noting(sgl_flash_attn.merge_state_v2),
        )

    def _noting(self, function, calls=None):
        calls = self.calls if calls is None else calls

        def called(*args, **kwargs):
            calls.append({"function": function.__name__, "args": args, **kwargs})
            return function(*args, **kwargs)

        return called


def world_of(*steps: Step, **case_settings: Any) -> World:
    case = Case(name="of-this-test", steps=steps, **{"max_context_len": 256, **case_settings})
    return make_world(case, CANDIDATE.platform, "cpu")


def run(world: World, backend: FA3Backend, step: Step, **prepared: Any) -> list[torch.Tensor]:
    """The output of each layer."""
    made = prepare_step(world, step, **prepared)
    backend.init_forward_metadata(made.batch)
    return [
        backend.forward(given.q, given.k, given.v, given.layer, made.batch, made.save_kv_cache)
        for given in made.inputs
    ]


@pytest.mark.parametrize("head_dim", [96, 192])
@pytest.mark.parametrize("step", [decode(45, 3), extend((0, 41), (16, 7))])
def test_other_head_dims(head_dim, step):
    case = Case(
        name="dim", steps=(step,), head_dim=head_dim, v_head_dim=head_dim, page_size=16, lse=True
    )
    outcome = run_case(CANDIDATE, case)
    assert outcome.status == "passed", outcome.message


def test_metadata_is_made_once_a_step():
    step = decode(40, 7)
    world = world_of(step, kv_in_pool=True)
    backend = FA3Backend(world.context, {}, EMULATED)
    prepared = prepare_step(world, step)
    backend.init_forward_metadata(prepared.batch)

    def outputs() -> list[torch.Tensor]:
        return [
            backend.forward(given.q, None, None, given.layer, prepared.batch)
            for given in prepared.inputs
        ]

    before = outputs()
    world.context.req_to_token_pool.req_to_token.zero_()
    torch.testing.assert_close(outputs(), before, rtol=0, atol=0)


def test_layers_of_one_pool_share_a_page_table():
    step = decode(40, 7)
    spy, world = Spy(), world_of(step, windows=(None, 8, 21), page_size=16)
    run(world, FA3Backend(world.context, {}, spy.kernels), step)
    assert len({call["page_table"].data_ptr() for call in spy.calls}) == 1
    assert [call["window_size"] for call in spy.calls] == [(-1, -1), (8, 0), (21, 0)]


def test_decode_keys_are_counted_by_the_batch_itself():
    step = decode(40, 7)
    spy, world = Spy(), world_of(step)
    backend, prepared = FA3Backend(world.context, {}, spy.kernels), prepare_step(world, step)
    backend.init_forward_metadata(prepared.batch)
    given = prepared.inputs[0]
    backend.forward(given.q, given.k, given.v, given.layer, prepared.batch)
    assert spy.calls[0]["cache_seqlens"] is prepared.batch.seq_lens
    assert "cu_seqlens_q" not in spy.calls[0]


@pytest.mark.parametrize(
    ("host_lens", "deterministic", "longest"),
    [(True, False, (30, 3)), (False, False, (37, 16)), (True, True, (256, 16))],
)
def test_longest_lengths(host_lens, deterministic, longest):
    step = extend((10, 30), (0, 7))
    spy = Spy()
    world = world_of(step, page_size=16, deterministic=deterministic)
    run(world, FA3Backend(world.context, {}, spy.kernels), step, host_lens=host_lens)
    call = spy.calls[0]
    assert (call["max_seqlen_q"], call["page_table"].shape[1]) == longest
    assert call["num_splits"] == (1 if deterministic else 0)


def test_an_option_fixes_the_splits():
    step = decode(40)
    spy, world = Spy(), world_of(step)
    run(world, FA3Backend(world.context, {"num_splits": 4}, spy.kernels), step)
    assert spy.calls[0]["num_splits"] == 4


@pytest.mark.parametrize("num_splits", [-1, 257])
def test_splits_that_the_library_refuses(num_splits):
    world = world_of(decode(3))
    with pytest.raises(InvalidInput) as refusal:
        FA3Backend(world.context, {"num_splits": num_splits}, EMULATED)
    assert refusal.value.argument == "num_splits"


@pytest.mark.parametrize(
    ("heads", "sinks", "served"), [(64, True, 1), (72, True, 0), (72, False, 1)]
)
def test_sinks_that_the_kernels_have_no_room_for(heads, sinks, served):
    case = Case(name="heads", steps=(decode(5),), num_q_heads=heads, sinks=sinks)
    assert run_case(CANDIDATE, case).status == ("passed" if served else "refused")
    if not served:
        world = make_world(case, CANDIDATE.platform, "cpu")
        with pytest.raises(InvalidInput, match="layer 1: expected 64 at most, got sinks of 72"):
            FA3Backend(world.context, {}, EMULATED)


def test_a_schedule_serves_the_layers_of_a_kind():
    step = decode(40, 7)
    spy, world = Spy(), world_of(step, windows=(None, 8, None), page_size=16)
    run(world, FA3Backend(world.context, {}, spy.kernels), step)
    first, windowed, last = spy.calls
    assert [call["window_size"] for call in spy.schedules] == [(-1, -1), (8, 0)]
    assert first["scheduler_metadata"] is last["scheduler_metadata"]
    assert first["scheduler_metadata"] is not windowed["scheduler_metadata"]


@pytest.mark.parametrize(
    ("step", "settings"),
    [(extend((0, 9), (4, 2)), {}), (decode(40, 7), {"deterministic": True})],
)
def test_calls_that_take_no_schedule(step, settings):
    """Packed queries are split by their number; where keys are never split, nothing is saved."""
    spy, world = Spy(), world_of(step, **settings)
    run(world, FA3Backend(world.context, {}, spy.kernels), step)
    assert {call["function"] for call in spy.calls} == {"flash_attn_with_kvcache"}
    assert all(call.get("scheduler_metadata") is None for call in spy.calls)
    assert spy.schedules == []


def test_no_requests_have_no_schedule():
    """The library would launch no block, and end the process."""
    spy, world = Spy(), world_of(decode(3))
    backend, made = FA3Backend(world.context, {}, spy.kernels), prepare_step(world, decode())
    backend.init_forward_metadata(made.batch)
    given = made.inputs[0]
    out = backend.forward(given.q, given.k, given.v, given.layer, made.batch)
    assert (len(out), spy.calls, spy.schedules) == (0, [], [])


def test_keys_of_the_call_are_not_looked_for_in_the_pool():
    step = extend((0, 9), (0, 4))
    spy, world = Spy(), world_of(step, save_kv_cache=False)
    run(world, FA3Backend(world.context, {}, spy.kernels), step)
    assert {call["function"] for call in spy.calls} == {"flash_attn_varlen_func"}


def test_without_a_prefix_the_keys_of_the_call_are_all():
    step = extend((0, 9), (0, 4))
    spy, world = Spy(), world_of(step, windows=(None, 3), page_size=16)
    run(world, FA3Backend(world.context, {}, spy.kernels), step, host_lens=True)
    assert [call["function"] for call in spy.calls] == ["flash_attn_varlen_func"] * 2


@pytest.mark.parametrize(
    ("settings", "host_lens"),
    [({"kv_dtype": "fp8_e4m3"}, True), ({"deterministic": True}, True), ({}, False)],
)
def test_without_a_prefix_keys_are_read_from_the_pool(settings, host_lens):
    """Quantised ones; those of results that must not depend on what else is in the batch; and all
    where the host does not know of prefixes."""
    step = extend((0, 9), (0, 4))
    spy, world = Spy(), world_of(step, page_size=16, **settings)
    run(world, FA3Backend(world.context, {}, spy.kernels), step, host_lens=host_lens)
    assert {call["function"] for call in spy.calls} == {"flash_attn_with_kvcache"}


def test_without_a_prefix_keys_of_another_dtype_are_read_from_the_pool():
    """Which has cast them."""
    step = extend((0, 9), (0, 4))
    spy, world = Spy(), world_of(step, page_size=16)
    backend = FA3Backend(world.context, {}, spy.kernels)
    made = prepare_step(world, step, host_lens=True)
    backend.init_forward_metadata(made.batch)
    given = made.inputs[0]
    backend.forward(given.q, given.k.float(), given.v.float(), given.layer, made.batch)
    assert {call["function"] for call in spy.calls} == {"flash_attn_with_kvcache"}


@pytest.mark.parametrize("step", [decode(40, 7), extend((16, 9), (0, 4)), verify(3, 9, 20)])
def test_keys_in_the_pool_are_never_packed(step):
    """`flash_attn_varlen_func` takes a page table and ignores it."""
    spy, world = Spy(), world_of(step, spec_topk=1)
    run(world, FA3Backend(world.context, {}, spy.kernels), step)
    assert {call["function"] for call in spy.calls} == {"flash_attn_with_kvcache"}


def test_lse_of_batched_and_of_packed_queries():
    """Drafts come back as [B, Hq, d], the same tokens of an extend step as [Hq, T]."""
    step = verify(3, 9, 20)
    spy, world = Spy(), world_of(step, spec_topk=1, kv_in_pool=True)
    backend, made = FA3Backend(world.context, {}, spy.kernels), prepare_step(world, step)
    given, drafts = made.inputs[0], made.batch
    extended = replace(
        drafts,
        forward_mode=ForwardMode.EXTEND,
        seq_lens=drafts.seq_lens + 3,
        seq_lens_cpu=None,
        spec_info=None,
    )
    found = []
    for batch in (drafts, extended):
        lse = torch.zeros(given.q.shape[:2])
        backend.init_forward_metadata(batch)
        backend.forward(given.q, None, None, given.layer, batch, lse=lse)
        found.append(lse)
    assert [call["args"][0].dim() for call in spy.calls] == [4, 3]
    torch.testing.assert_close(*found)
    assert len(found[0].unique()) == found[0].numel()


def test_a_captured_table_is_as_wide_as_the_longest_context():
    """The library splits keys by the table's width, and a graph keeps what it chose."""
    spy, world = Spy(), world_of(decode(5, 6), page_size=16)
    backend = FA3Backend(world.context, {}, spy.kernels)
    backend.init_cuda_graph_state(2, 2)
    made = prepare_step(world, decode(5, 6))
    backend.init_forward_metadata_out_graph(made.batch, in_capture=True)
    backend.init_forward_metadata_in_graph(made.batch)
    given = made.inputs[0]
    backend.forward(given.q, given.k, given.v, given.layer, made.batch)
    assert spy.calls[0]["page_table"].shape == (2, 256 // 16)
    assert spy.calls[0]["num_splits"] == 0


def test_layers_without_a_place_in_the_pool():
    step = extend((0, 9), (0, 4))
    world = world_of(step, save_kv_cache=False)
    elsewhere = MHATokenToKVPool(
        size=16,
        page_size=1,
        dtype=torch.bfloat16,
        layer_ids=[99],
        num_kv_heads=2,
        head_dim=128,
        device="cpu",
    )
    backend = FA3Backend(replace(world.context, token_to_kv_pool=elsewhere), {}, EMULATED)
    prepared = prepare_step(world, step)
    backend.init_forward_metadata(prepared.batch)
    given = prepared.inputs[0]
    out = backend.forward(
        given.q, given.k, given.v, given.layer, prepared.batch, save_kv_cache=False
    )
    expected, _ = reference.attention(
        given.q,
        given.layer,
        prepared.batch,
        world.context.req_to_token_pool.req_to_token,
        elsewhere,
        k=given.k,
        v=given.v,
    )
    torch.testing.assert_close(out.double(), expected, atol=8e-3, rtol=1.6e-2)
    with pytest.raises(AttnmuxError, match="layer 1 is not in the KV pool"):
        backend.forward(given.q, None, None, given.layer, prepared.batch)


def test_rows_that_the_kernels_cannot_load_are_copied():
    step = extend((0, 9), (3, 4))
    world = world_of(step, kv_in_pool=True)
    backend, prepared = FA3Backend(world.context, {}, EMULATED), prepare_step(world, step)
    backend.init_forward_metadata(prepared.batch)
    given = prepared.inputs[0]

    def forward(q, out=None):
        return backend.forward(q, None, None, given.layer, prepared.batch, out=out)

    expected = forward(given.q)
    width = given.q[0].numel()
    rows = torch.empty(len(given.q), width + 3, dtype=given.q.dtype)
    for start in (0, 1):
        odd = rows[:, start : start + width].view(given.q.shape)
        assert torch.equal(forward(odd.copy_(given.q)), expected)
    out = torch.full_like(rows, 7)[:, 1 : width + 1].view(given.q.shape)
    assert forward(given.q, out) is out
    assert torch.equal(out, expected)


def test_queries_beyond_the_range_of_fp8_saturate():
    step = decode(5)
    world = world_of(step, kv_dtype="fp8_e4m3", kv_in_pool=True)
    backend, prepared = FA3Backend(world.context, {}, EMULATED), prepare_step(world, step)
    backend.init_forward_metadata(prepared.batch)
    given = prepared.inputs[0]
    out = backend.forward(given.q * 1e4, None, None, given.layer, prepared.batch)
    assert out.isfinite().all()


@pytest.mark.parametrize("sinks", [False, True])
def test_cross_attention_to_an_empty_encoder(sinks):
    step = extend((0, 3), encoder=(4,))
    world = world_of(step, sinks=sinks)
    backend, prepared = FA3Backend(world.context, {}, EMULATED), prepare_step(world, step)
    backend.init_forward_metadata(prepared.batch)
    given = prepared.inputs[-1]
    lse = torch.zeros(given.q.shape[:2])
    nothing = given.k[:0]
    out = backend.forward(
        given.q, nothing, nothing, given.layer, prepared.batch, save_kv_cache=False, lse=lse
    )
    assert not out.any()
    expected = given.layer.sinks if sinks else torch.full((8,), -torch.inf)
    assert torch.equal(lse, expected.expand_as(lse))


def test_graphs_of_several_modes_live_side_by_side():
    small, large = decode(40, 7), verify(3, 9, 21, 30, 5)
    world = world_of(small, large, spec_topk=1, kv_in_pool=True)
    backend, graphs = FA3Backend(world.context, {}, EMULATED), RecordingGraphs()

    def capture(step: Step):
        prepared = prepare_step(world, step)
        batch = prepared.batch
        backend.init_cuda_graph_state(batch.batch_size, batch.num_tokens)
        backend.init_forward_metadata_out_graph(batch, in_capture=True)
        given = prepared.inputs[0]
        with torch.no_grad():
            return graphs.capture(
                GraphStep(
                    prepare=lambda: backend.init_forward_metadata_in_graph(batch),
                    forward=lambda: backend.forward(given.q, None, None, given.layer, batch),
                )
            ), prepared

    graph, prepared = capture(small)
    graph.replay()
    expected = graph.outputs.clone()
    buffers = [buffer.clone() for buffer in world.context.token_to_kv_pool.get_kv_buffer(1)]
    table = world.context.req_to_token_pool.req_to_token.clone()
    other, of_other = capture(large)
    other.replay()
    world.context.req_to_token_pool.req_to_token.copy_(table)
    for buffer, before in zip(
        world.context.token_to_kv_pool.get_kv_buffer(1), buffers, strict=True
    ):
        buffer.copy_(before)
    graph.outputs.zero_()
    graph.replay()
    assert torch.equal(graph.outputs, expected)
    assert (prepared.batch.batch_size, of_other.batch.batch_size) == (2, 4)


def test_a_tree_is_two_calls_and_a_merge():
    step = verify(6, 9, 0)
    spy, world = Spy(), world_of(step, spec_topk=4, page_size=16)
    run(world, FA3Backend(world.context, {}, spy.kernels), step)
    prefix, drafts, merge = spy.calls[:3]
    assert [call["function"] for call in spy.calls[:3]] == [
        "flash_attn_with_kvcache",
        "flash_attn_with_kvcache",
        "merge_state_v2",
    ]
    assert prefix["cache_seqlens"].tolist() == [9, 0]
    assert len(drafts["cache_seqlens"]) == 12
    assert (prefix["causal"], drafts["causal"]) == (False, False)
    assert [call["args"][1].shape[1] for call in (prefix, drafts)] == [16, 1]
    assert len(merge["v_merged"]) == 12


TREES: dict[str, dict[str, Any]] = {
    "plain": {},
    "pages": {"page_size": 16, "lse": True},
    "cap": {"logit_cap": 2.0},
    "fp8": {"kv_dtype": "fp8_e4m3", "kv_scales": (0.5, 3.0), "page_size": 3},
    "fp8-fp16": {"kv_dtype": "fp8_e4m3", "dtype": "float16", "lse": True},
    "in-pool": {"kv_in_pool": True},
    "dims": {"head_dim": 192, "v_head_dim": 128},
}


@pytest.mark.parametrize("settings", TREES.values(), ids=TREES)
@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_trees_beside(settings, graph):
    """Over any page: the card names fewer, as the field does."""
    clauses = tuple(replace(clause, page_size=ANY) for clause in FA3.clauses)
    wider = replace(CANDIDATE, card=replace(CANDIDATE.card, clauses=clauses))
    steps = verify(6, 9, 0, 33), verify(6, 70, padding=1)
    outcome = run_case(wider, Case(name="tree", steps=steps, spec_topk=4, graph=graph, **settings))
    assert outcome.status == "passed", outcome.message


@pytest.mark.parametrize(
    "settings", [{"windows": (None, 8)}, {"attention_chunk": 16}, {"sinks": True}]
)
def test_trees_are_refused_where_more_than_their_mask_hides(settings):
    world = world_of(verify(3, 5), spec_topk=4, **settings)
    backend = FA3Backend(world.context, {}, EMULATED)
    with pytest.raises(InvalidInput, match=r"custom_mask.*layers \["):
        backend.init_forward_metadata((made := prepare_step(world, verify(3, 5))).batch)
    given = made.inputs[0]
    with pytest.raises(AttnmuxError, match="init_forward_metadata"):
        backend.forward(given.q, given.k, given.v, given.layer, made.batch)
    backend.init_forward_metadata(prepare_step(world, decode(5)).batch)


@pytest.mark.parametrize("max_batch_size", [0, 1])
def test_a_capture_without_room_is_refused(max_batch_size):
    """Else a table as wide as the captured batch's keys would be replayed with longer ones."""
    world = world_of(decode(5, 6))
    backend = FA3Backend(world.context, {}, EMULATED)
    if max_batch_size:
        backend.init_cuda_graph_state(max_batch_size, max_batch_size)
    batch = prepare_step(world, decode(5, 6)).batch
    with pytest.raises(GraphUnsupported, match="init_cuda_graph_state"):
        backend.init_forward_metadata_out_graph(batch, in_capture=True)


def changed(step: Step, **fields: Any):
    world = world_of(step, spec_topk=1)
    return FA3Backend(world.context, {}, EMULATED), replace(
        prepare_step(world, step).batch, **fields
    )


MASKED = prepare_step(world_of(verify(3, 5), spec_topk=4), verify(3, 5)).batch.spec_info
THREE_TOKENS = dict.fromkeys(("out_cache_loc", "positions"), torch.zeros(3, dtype=torch.int64))
ITEMS = MultiItem(
    prefix_lens=torch.zeros(1, dtype=torch.int32),
    token_pos_in_items=torch.zeros(3, dtype=torch.int32),
)


@pytest.mark.parametrize(
    ("step", "fields", "argument"),
    [
        (extend((0, 3)), {"spec_info": MASKED}, "custom_mask"),
        (verify(3, 5), {"spec_info": None}, "spec_info"),
        (extend((0, 3)), {"multi_item": ITEMS}, "multi_item"),
        (extend((0, 3)), {"extend_seq_lens": None}, "extend_seq_lens"),
        (decode(3, 4), THREE_TOKENS, "out_cache_loc"),
    ],
)
def test_steps_that_are_refused(step, fields, argument):
    backend, batch = changed(step, **fields)
    with pytest.raises(InvalidInput) as refusal:
        backend.init_forward_metadata(batch)
    assert refusal.value.argument == argument


@pytest.mark.parametrize(
    ("settings", "argument"),
    [
        ({"kv_dtype": "float16"}, "token_to_kv_pool"),
        ({"kv_dtype": "fp8_e5m2"}, "token_to_kv_pool"),
        (
            {"kind": "mla", "num_kv_heads": 1, "kv_lora_rank": 64, "qk_rope_head_dim": 16},
            "layer 1",
        ),
    ],
)
def test_pools_and_layers_that_are_refused(settings, argument):
    world = world_of(decode(3), **settings)
    with pytest.raises(InvalidInput) as refusal:
        FA3Backend(world.context, {}, EMULATED)
    assert refusal.value.argument == argument


def test_keys_of_another_dtype_are_refused():
    step = extend((0, 3))
    world = world_of(step, save_kv_cache=False)
    backend, prepared = FA3Backend(world.context, {}, EMULATED), prepare_step(world, step)
    backend.init_forward_metadata(prepared.batch)
    given = prepared.inputs[0]
    with pytest.raises(InvalidInput, match=r"k: expected torch\.bfloat16"):
        backend.forward(
            given.q, given.k.half(), given.v, given.layer, prepared.batch, save_kv_cache=False
        )


def test_forward_needs_a_prepared_step():
    step = decode(3)
    world = world_of(step)
    backend, prepared = FA3Backend(world.context, {}, EMULATED), prepare_step(world, step)
    given = prepared.inputs[0]
    with pytest.raises(AttnmuxError, match="init_forward_metadata"):
        backend.forward(given.q, given.k, given.v, given.layer, prepared.batch)


def test_nothing_is_prepared_for_an_idle_step():
    backend, batch = changed(extend(mode=ForwardMode.IDLE))
    backend.init_forward_metadata(batch)


def test_kernels_that_do_not_run_here():
    def fails(*args, **kwargs):
        raise RuntimeError("CUDA error: no kernel image is available\nmore lines")

    world = world_of(decode(3))
    try_kernels(EMULATED, world.context)
    kernels = replace(EMULATED, flash_attn_varlen_func=fails)
    with pytest.raises(BackendFailed, match=r"no kernel image is available$"):
        try_kernels(kernels, world.context)


def test_scale_is_the_layers():
    step = decode(3)
    spy, world = Spy(), world_of(step, scaling=0.3, logit_cap=2.0)
    run(world, FA3Backend(world.context, {}, spy.kernels), step)
    assert [call["softcap"] for call in spy.calls] == [2.0, 4.0]
    assert math.isclose(spy.calls[1]["softmax_scale"], 0.6)
