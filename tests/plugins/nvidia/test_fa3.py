from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from attnmux.core import AttnmuxError, ForwardMode, InvalidInput, MultiItem, Platform
from attnmux.core.plugin import ANY
from attnmux.emulators.candidates import SGL_FLASH_ATTN as EMULATED
from attnmux.nvidia.cards.fa3 import FA3
from attnmux.nvidia.fa3.backend import make
from attnmux.testing import (
    AttentionBackendTests,
    Case,
    decode,
    extend,
    prepare_step,
    run_case,
    verify,
)
from attnmux.testing.adapters.checks import (
    check_keys_of_another_dtype_are_refused,
    check_large_queries_saturate,
)
from attnmux.testing.adapters.tests import (
    AdapterTests,
    AdapterWorld,
    KernelCall,
    assert_passes,
    check_graphs_side_by_side,
    check_layers_outside_the_pool,
    outputs,
    recorded,
)

HOPPER = Platform.parse("nvidia:sm90,cuda=13.0")
WORLD = AdapterWorld(
    library=make, kernels=EMULATED, platform=HOPPER, settings={"max_context_len": 256}
)
CANDIDATE = WORLD.candidate(FA3)
PAGED, PACKED = "flash_attn_with_kvcache", "flash_attn_varlen_func"
SCHEDULE, MERGE = "get_scheduler_metadata", "merge_state_v2"


class TestFA3Emulated(AttentionBackendTests):
    backend = CANDIDATE
    page_sizes = (1, 16)


class TestFA3Adapter(AdapterTests):
    adapter = WORLD


def attentions(calls: list[KernelCall]) -> list[KernelCall]:
    return [call for call in calls if call.name in (PAGED, PACKED)]


def names(calls: list[KernelCall]) -> list[str]:
    return [call.name for call in calls]


@pytest.mark.parametrize("head_dim", [96, 192])
@pytest.mark.parametrize("step", [decode(45, 3), extend((0, 41), (16, 7))])
def test_other_head_dims(head_dim, step):
    dims = {"head_dim": head_dim, "v_head_dim": head_dim}
    assert_passes(CANDIDATE, step, page_size=16, lse=True, **dims)


def test_layers_of_one_pool_share_a_page_table():
    calls = attentions(WORLD.calls(decode(40, 7), windows=(None, 8, 21), page_size=16))
    assert len({call.kwargs["page_table"].data_ptr() for call in calls}) == 1
    assert [call.kwargs["window_size"] for call in calls] == [(-1, -1), (8, 0), (21, 0)]


def test_decode_reads_the_lengths_of_the_batch():
    kernels, calls = recorded(EMULATED)
    backend, prepared = WORLD.prepared(decode(40, 7), kernels=kernels)
    outputs(backend, prepared)
    call = attentions(calls)[0].kwargs
    assert call["cache_seqlens"] is prepared.batch.seq_lens
    assert "cu_seqlens_q" not in call


@pytest.mark.parametrize(
    ("host_lens", "deterministic", "longest"),
    [(True, False, (30, 3)), (False, False, (37, 16)), (True, True, (256, 16))],
)
def test_longest_lengths(host_lens, deterministic, longest):
    step, settings = extend((10, 30), (0, 7)), {"page_size": 16, "deterministic": deterministic}
    call = WORLD.calls(step, host_lens=host_lens, **settings)[0].kwargs
    assert (call["max_seqlen_q"], call["page_table"].shape[1]) == longest
    assert call["num_splits"] == (1 if deterministic else 0)


def test_an_option_fixes_the_splits():
    calls = WORLD.calls(decode(40), options={"num_splits": 4})
    assert [call.kwargs["num_splits"] for call in calls] == [4] * 3


@pytest.mark.parametrize("num_splits", [-1, 257])
def test_splits_that_are_refused(num_splits):
    given = {"num_splits": num_splits}
    WORLD.refuses("num_splits: expected 0 to 256", decode(3), options=given)


@pytest.mark.parametrize(
    ("heads", "sinks", "served"), [(64, True, 1), (72, True, 0), (72, False, 1)]
)
def test_sinks_of_many_heads(heads, sinks, served):
    settings = {"num_q_heads": heads, "sinks": sinks}
    outcome = run_case(CANDIDATE, Case(name="heads", steps=(decode(5),), **settings))
    assert outcome.status == ("passed" if served else "refused")
    if not served:
        WORLD.refuses("layer 1: expected at most 64, got sinks of 72", decode(5), **settings)


def test_a_schedule_serves_the_layers_of_a_kind():
    calls = WORLD.calls(decode(40, 7), windows=(None, 8, None), page_size=16)
    assert names(calls) == [SCHEDULE, SCHEDULE, PAGED, PAGED, PAGED]
    assert [call.kwargs["window_size"] for call in calls[:2]] == [(-1, -1), (8, 0)]
    first, windowed, last = (call.kwargs["scheduler_metadata"] for call in calls[2:])
    assert first is last
    assert first is not windowed


@pytest.mark.parametrize(
    ("step", "settings"),
    [(extend((0, 9), (4, 2)), {}), (decode(40, 7), {"deterministic": True})],
)
def test_calls_without_a_schedule(step, settings):
    """Packed queries are split by their number; where keys are never split, nothing is saved."""
    calls = WORLD.calls(step, **settings)
    assert names(calls) == [PAGED, PAGED]
    assert all(call.kwargs.get("scheduler_metadata") is None for call in calls)


def test_without_requests_nothing_is_launched():
    """The library would launch no block, and end the process."""
    assert WORLD.calls(decode()) == []


@pytest.mark.parametrize(
    ("step", "settings", "name"),
    [
        (extend((0, 9), (0, 4)), {"save_kv_cache": False}, PACKED),
        (extend((0, 9), (0, 4)), {"host_lens": True}, PACKED),
        (extend((0, 9), (0, 4)), {}, PAGED),
        (extend((0, 9), (0, 4)), {"host_lens": True, "kv_dtype": "fp8_e4m3"}, PAGED),
        (extend((0, 9), (0, 4)), {"host_lens": True, "deterministic": True}, PAGED),
        (extend((16, 9), (0, 4)), {"host_lens": True}, PAGED),
        (decode(40, 7), {}, PAGED),
        (verify(3, 9, 20), {"spec_topk": 1}, PAGED),
    ],
)
def test_where_keys_are_read(step, settings, name):
    """From the call where it brings them all; `flash_attn_varlen_func` ignores a page table. From
    the pool where it quantises them, where results must not depend on the rest of the batch, and
    where the host does not know of prefixes."""
    calls = attentions(WORLD.calls(step, windows=(None, 3), page_size=16, **settings))
    assert names(calls) == [name] * 2


def test_without_a_prefix_keys_of_another_dtype_are_read_from_the_pool():
    """Which has cast them."""
    kernels, calls = recorded(EMULATED)
    step = extend((0, 9), (0, 4))
    backend, made = WORLD.prepared(step, kernels=kernels, kv_in_pool=False, host_lens=True)
    given = made.inputs[0]
    backend.forward(given.q, given.k.float(), given.v.float(), given.layer, made.batch)
    assert names(calls) == [PAGED]


def test_lse_of_batched_and_of_packed_queries():
    """Drafts come back as [B, Hq, d], the same tokens of an extend step as [Hq, T]."""
    kernels, calls = recorded(EMULATED)
    backend, made = WORLD.prepared(verify(3, 9, 20), kernels=kernels, spec_topk=1)
    extended = replace(
        made.batch,
        forward_mode=ForwardMode.EXTEND,
        seq_lens=made.batch.seq_lens + 3,
        seq_lens_cpu=None,
        spec_info=None,
    )
    found = []
    for batch in (made.batch, extended):
        lse = torch.zeros(made.inputs[0].q.shape[:2])
        backend.init_forward_metadata(batch)
        outputs(backend, replace(made, batch=batch, inputs=made.inputs[:1]), lse=lse)
        found.append(lse)
    assert [call.args[0].dim() for call in attentions(calls)] == [4, 3]
    torch.testing.assert_close(*found)
    assert len(found[0].unique()) == found[0].numel()


def test_a_captured_table_is_as_wide_as_the_longest_context():
    """The library splits keys by the table's width, and a graph keeps what it chose."""
    _, calls = WORLD.captured(decode(5, 6), page_size=16)
    assert calls[-1].kwargs["page_table"].shape == (2, 256 // 16)
    assert attentions(calls)[0].kwargs["num_splits"] == 0


def test_layers_outside_the_pool():
    check_layers_outside_the_pool(WORLD, extend((0, 9), (0, 4)))


def test_queries_beyond_the_range_of_fp8_saturate():
    check_large_queries_saturate(WORLD, kv_dtype="fp8_e4m3")


@pytest.mark.parametrize("sinks", [False, True])
def test_cross_attention_to_an_empty_encoder(sinks):
    backend, made = WORLD.prepared(extend((0, 3), encoder=(4,)), sinks=sinks, kv_in_pool=False)
    given = made.inputs[-1]
    lse, empty = torch.zeros(given.q.shape[:2]), given.k[:0]
    last = replace(made, inputs=(replace(given, k=empty, v=empty),), save_kv_cache=False)
    (out,) = outputs(backend, last, lse=lse)
    assert not out.any()
    expected = given.layer.sinks if sinks else torch.full((8,), -torch.inf)
    assert torch.equal(lse, expected.expand_as(lse))


def test_graphs_of_several_modes_live_side_by_side():
    check_graphs_side_by_side(WORLD, decode(40, 7), verify(3, 9, 21, 30, 5), spec_topk=1)


def test_a_tree_is_two_calls_and_a_merge():
    prefix, drafts, merge, *_ = calls = WORLD.calls(verify(6, 9, 0), spec_topk=4, page_size=16)
    assert names(calls) == [PAGED, PAGED, MERGE] * 2
    assert prefix.kwargs["cache_seqlens"].tolist() == [9, 0]
    assert len(drafts.kwargs["cache_seqlens"]) == 12
    assert (prefix.kwargs["causal"], drafts.kwargs["causal"]) == (False, False)
    assert [call.args[1].shape[1] for call in (prefix, drafts)] == [16, 1]
    assert len(merge.kwargs["v_merged"]) == 12


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
def test_trees(settings, graph):
    """Over any page: the card names fewer, as the field does."""
    clauses = tuple(replace(clause, page_size=ANY) for clause in FA3.clauses)
    wider = replace(CANDIDATE, card=replace(CANDIDATE.card, clauses=clauses))
    steps = verify(6, 9, 0, 33), verify(6, 70, padding=1)
    assert_passes(wider, *steps, spec_topk=4, graph=graph, **settings)


@pytest.mark.parametrize(
    "settings", [{"windows": (None, 8)}, {"attention_chunk": 16}, {"sinks": True}]
)
def test_trees_are_refused_where_more_than_their_mask_hides(settings):
    world = WORLD.world(verify(3, 5), spec_topk=4, **settings)
    backend, made = WORLD.backend(world.context), prepare_step(world, verify(3, 5))
    with pytest.raises(InvalidInput, match=r"custom_mask.*layers \["):
        backend.init_forward_metadata(made.batch)
    with pytest.raises(AttnmuxError, match="init_forward_metadata"):
        outputs(backend, made)
    backend.init_forward_metadata(prepare_step(world, decode(5)).batch)


MASKED = WORLD.prepared(verify(3, 5), spec_topk=4)[1].batch.spec_info
THREE_TOKENS = dict.fromkeys(("out_cache_loc", "positions"), torch.zeros(3, dtype=torch.int64))
ITEMS = MultiItem(
    prefix_lens=torch.zeros(1, dtype=torch.int32),
    token_pos_in_items=torch.zeros(3, dtype=torch.int32),
)


@pytest.mark.parametrize(
    ("step", "fields", "argument"),
    [
        (extend((0, 3)), {"spec_info": MASKED}, "spec_info.custom_mask"),
        (verify(3, 5), {"spec_info": None}, "spec_info"),
        (extend((0, 3)), {"multi_item": ITEMS}, "multi_item"),
        (extend((0, 3)), {"extend_seq_lens": None}, "extend_seq_lens"),
        (decode(3, 4), THREE_TOKENS, "out_cache_loc"),
    ],
)
def test_steps_that_are_refused(step, fields, argument):
    WORLD.refuses(f"^{argument}: ", step, batch=fields, spec_topk=1, kv_in_pool=True)


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
    WORLD.refuses(f"^{argument}: ", decode(3), **settings)


def test_keys_of_another_dtype_are_refused():
    check_keys_of_another_dtype_are_refused(WORLD, r"k: expected torch\.bfloat16")


def test_scale_and_cap_are_the_layers():
    calls = attentions(WORLD.calls(decode(3), scaling=0.3, logit_cap=2.0))
    assert [call.kwargs["softcap"] for call in calls] == [2.0, 4.0]
    assert math.isclose(calls[1].kwargs["softmax_scale"], 0.6)
