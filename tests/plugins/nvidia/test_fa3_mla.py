from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from attnmux.core import GraphUnsupported, InvalidInput, Platform
from attnmux.core.contract.spec import whole_mask
from attnmux.core.plugin import KeyGroup
from attnmux.emulators.candidates import SGL_FLASH_ATTN as EMULATED
from attnmux.nvidia.cards.fa3_mla import FA3_MLA
from attnmux.nvidia.fa3.mla import make
from attnmux.nvidia.fa3.steps import draft_keys
from attnmux.parts.speculation import tree_visibility
from attnmux.testing import (
    AttentionBackendTests,
    CaseSetup,
    decode,
    extend,
    prepare_step,
    reference,
    verify,
)
from attnmux.testing.adapters.checks import check_keys_of_another_dtype_are_refused
from attnmux.testing.adapters.tests import (
    LATENT,
    AdapterTests,
    AdapterWorld,
    check_graphs_side_by_side,
    check_layers_outside_the_pool,
    outputs,
    recorded,
)

HOPPER = Platform.parse("nvidia:sm90,cuda=13.0")
SETTINGS = {**LATENT, "num_q_heads": 4, "max_context_len": 256}
WORLD = AdapterWorld(library=make, kernels=EMULATED, platform=HOPPER, settings=SETTINGS)
PAGED, SCHEDULE = "flash_attn_with_kvcache", "get_scheduler_metadata"
TREE = (-1, 0, 0, 0, 1, 1)
"""The parent of each of six drafts."""


class TestFA3MLAEmulated(AttentionBackendTests):
    backend = WORLD.candidate(FA3_MLA)
    page_sizes = (1, 16)


class TestFA3MLAAdapter(AdapterTests):
    adapter = WORLD


def attentions(step, **settings: Any) -> list[Any]:
    return [call for call in WORLD.calls(step, **settings) if call.name != SCHEDULE]


def test_the_cache_is_two_views_of_the_pool():
    kernels, calls = recorded(EMULATED)
    backend, made = WORLD.prepared(decode(40, 7), kernels=kernels, page_size=16)
    outputs(backend, made)
    rows = backend.context.token_to_kv_pool.get_key_buffer(1)
    call = next(call for call in calls if call.name == PAGED)
    q, k_cache, v_cache = call.args
    assert (q.shape[-1], call.kwargs["qv"].shape[-1]) == (64, 512)
    assert k_cache.shape == (len(rows) // 16, 16, 1, 64)
    assert v_cache.shape == (len(rows) // 16, 16, 1, 512)
    assert v_cache.data_ptr() == rows.data_ptr()
    assert k_cache.data_ptr() == rows.data_ptr() + 512 * rows.itemsize
    assert k_cache.stride() == v_cache.stride() == (16 * 576, 576, 576, 1)


@pytest.mark.parametrize("step", [decode(40, 7), extend((16, 9), (0, 4)), verify(3, 9, 20)])
def test_a_paged_step_is_one_call_a_layer(step):
    """`flash_attn_varlen_func` ignores a page table: it is for the call's own keys."""
    calls = attentions(step, spec_topk=1)
    assert [call.name for call in calls] == [PAGED] * 2
    assert all(call.kwargs["causal"] for call in calls)


@pytest.mark.parametrize(
    ("options", "deterministic", "splits"),
    [({}, False, 0), ({"num_splits": 4}, False, 4), ({"num_splits": 4}, True, 1)],
)
def test_splits(options, deterministic, splits):
    call = attentions(decode(40), options=options, deterministic=deterministic)[0]
    assert call.kwargs["num_splits"] == splits


def drafted(setup: CaseSetup, **spec: Any):
    """A step of two requests with the drafts of `TREE`."""
    made = prepare_step(setup, verify(6, 9, 0))
    mask = whole_mask(tree_visibility(torch.tensor([TREE, TREE])), made.batch.seq_lens)
    info = replace(made.batch.spec_info, **{"custom_mask": mask, **spec})
    return replace(made, batch=replace(made.batch, spec_info=info))


def test_the_keys_of_each_draft():
    setup = WORLD.world(verify(6, 9, 0), spec_topk=4)
    batch = drafted(setup).batch
    group = KeyGroup.of(setup.context.layers[0], setup.context)
    keys = draft_keys(batch, batch.visible_drafts(), group, setup.context)
    seen = [[0], [0, 1], [0, 2], [0, 3], [0, 1, 4], [0, 1, 5]]
    assert keys.lens.tolist() == [len(drafts) for drafts in seen] * 2
    slots = batch.out_cache_loc.view(2, 6)
    for row, (request, drafts) in enumerate((r, drafts) for r in (0, 1) for drafts in seen):
        padding = [0] * (6 - len(drafts))
        assert keys.page_table[row].tolist() == slots[request, drafts].tolist() + padding


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("spec", [{}, {"mask_indptr": None}])
def test_a_tree_is_two_calls_and_a_merge(spec, page_size):
    """The drafts' own keys are named by slots, whatever the pool's pages are."""
    setup = WORLD.world(verify(6, 9, 0), spec_topk=4, page_size=page_size)
    (kernels, calls), made = recorded(EMULATED), drafted(setup, **spec)
    made = replace(made, inputs=made.inputs[:1])
    backend, given = WORLD.backend(setup.context, kernels=kernels), made.inputs[0]
    backend.init_forward_metadata(made.batch)
    lse = torch.zeros(given.q.shape[:2])
    (out,) = outputs(backend, made, lse=lse)
    prefix, drafts, merge = calls
    assert prefix.kwargs["cache_seqlens"].tolist() == [9, 0]
    assert drafts.kwargs["cache_seqlens"].tolist() == [1, 2, 2, 2, 3, 3] * 2
    assert not prefix.kwargs["causal"]
    assert not drafts.kwargs["causal"]
    assert merge.name == "merge_state_v2"
    table, pool = setup.context.req_to_token_pool.req_to_token, setup.context.token_to_kv_pool
    right, right_lse = reference.attention(
        given.q, given.layer, made.batch, table, pool, q_rope=given.q_rope
    )
    torch.testing.assert_close(out.double(), right, atol=8e-3, rtol=1.6e-2)
    torch.testing.assert_close(lse.double(), right_lse, atol=1e-3, rtol=1e-3)


def hiding(request: int, draft: int, key: int) -> torch.Tensor:
    """The mask of `drafted`, without one value."""
    mask = whole_mask(tree_visibility(torch.tensor([TREE, TREE])), torch.tensor([9, 0]))
    mask[(6 * 15 if request else 0) + draft * (6 if request else 15) + key] = False
    return mask


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (hiding(0, 4, 3), "cached tokens hidden from drafts in request 0"),
        (hiding(1, 2, 2), "a draft token hidden from itself in request 1"),
        (hiding(1, 2, 2)[:-1], "expected 126, .* got 125 values"),
    ],
)
def test_masks_that_are_no_trees_are_refused_in_debug_mode(mask, message):
    setup = WORLD.world(verify(6, 9, 0), spec_topk=4)
    backend = WORLD.backend(replace(setup.context, debug=True))
    backend.init_forward_metadata(drafted(setup).batch)
    with pytest.raises(InvalidInput, match=message):
        backend.init_forward_metadata(drafted(setup, custom_mask=mask).batch)


def test_a_mask_belongs_to_drafts():
    backend, made = WORLD.prepared(extend((0, 3)))
    spec = drafted(WORLD.world(verify(6, 9, 0), spec_topk=4)).batch.spec_info
    with pytest.raises(InvalidInput, match="custom_mask"):
        backend.init_forward_metadata(replace(made.batch, spec_info=spec))


@pytest.mark.parametrize(
    ("small", "large"),
    [(verify(3, 9, 4), verify(5, 3, 9, 21)), (verify(4, 9), decode(3, 9, 21, 30, 7))],
    ids=["trees", "tree and decode"],
)
def test_graphs_of_trees_live_side_by_side(small, large):
    check_graphs_side_by_side(WORLD, small, large, spec_topk=4)


def test_a_captured_table_is_as_wide_as_the_longest_context():
    """The library splits keys by the table's width, and a graph keeps what it chose."""
    _, calls = WORLD.captured(decode(5, 6), page_size=16)
    assert calls[-1].kwargs["page_table"].shape == (2, 256 // 16)


@pytest.mark.parametrize(("max_bs", "tokens"), [(0, 0), (1, 6), (2, 6)])
def test_a_captured_tree_without_room_is_refused(max_bs, tokens):
    setup = WORLD.world(verify(6, 9, 0), spec_topk=4)
    backend = WORLD.backend(setup.context)
    backend.init_cuda_graph_state(max_bs, tokens)
    with pytest.raises(GraphUnsupported, match="init_cuda_graph_state"):
        backend.init_forward_metadata_out_graph(drafted(setup).batch, in_capture=True)


@pytest.mark.parametrize(
    ("changes", "got"),
    [
        ({"sliding_window_size": 8}, "a layer with sliding_window"),
        ({"attention_chunk_size": 16}, "a layer with attention_chunk"),
        ({"logit_cap": 2.0}, "a layer with logit_cap"),
        ({"sinks": torch.zeros(4)}, "sinks"),
        ({"is_causal": False}, "a layer with bidirectional"),
        ({"qk_head_dim": 288, "v_head_dim": 256}, r"256 \+ 32 dims"),
        ({"kind": "mha", "qk_head_dim": 128, "v_head_dim": 128}, "mha"),
    ],
)
def test_layers_that_are_refused(changes, got):
    WORLD.refuses(got, decode(3), layer=changes)


@pytest.mark.parametrize("kv_dtype", ["float16", "fp8_e4m3", "fp8_e5m2"])
def test_pools_that_are_refused(kv_dtype):
    WORLD.refuses("token_to_kv_pool: expected bfloat16", decode(3), kv_dtype=kv_dtype)


def test_layers_outside_the_pool():
    check_layers_outside_the_pool(WORLD, extend((0, 9), (0, 4)))


def test_latents_of_another_dtype_are_refused():
    check_keys_of_another_dtype_are_refused(WORLD, r"k: expected torch\.bfloat16")


@pytest.mark.parametrize("name", [PAGED, "merge_state_v2"])
def test_kernels_of_trees_are_tried(name):
    error = RuntimeError("CUDA error: no kernel image is available")
    assert "no kernel image" in str(WORLD.fails(error, name, step=verify(6, 9), spec_topk=4))
