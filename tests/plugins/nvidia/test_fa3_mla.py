from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from attnmux.core.choosing.platform import Platform
from attnmux.core.errors import AttnmuxError, BackendFailed, GraphUnsupported, InvalidInput
from attnmux.core.graph.devices import GraphStep
from attnmux.core.kv import MLATokenToKVPool
from attnmux.core.spec import tree_mask
from attnmux.emulators.nvidia import sgl_flash_attn
from attnmux.nvidia.cards.fa3_mla import FA3_MLA
from attnmux.nvidia.fa3.drafts import draft_keys, visible_drafts
from attnmux.nvidia.fa3_mla import FA3MLABackend, Kernels
from attnmux.nvidia.fa3_mla.trial import try_kernels
from attnmux.nvidia.page_tables import KeyGroup
from attnmux.testing import (
    AttentionBackendTests,
    Candidate,
    Case,
    World,
    make_world,
    prepare_step,
    reference,
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
    card=replace(FA3_MLA, status="available", requires=()),
    platform=Platform.parse("nvidia:sm90,cuda=13.0"),
    device="cpu",
    factory=lambda context, options: FA3MLABackend(context, options, EMULATED),
)

LATENT: dict[str, Any] = {
    "kind": "mla",
    "num_q_heads": 4,
    "num_kv_heads": 1,
    "head_dim": 192,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "max_context_len": 256,
}
TREE = (-1, 0, 0, 0, 1, 1)
"""The parent of each of six drafts."""


class TestFA3MLAEmulated(AttentionBackendTests):
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
            merge_state_v2=sgl_flash_attn.merge_state_v2,
        )

    def _noting(
        self, function: Callable[..., Any], calls: list[dict[str, Any]] | None = None
    ) -> Callable[..., Any]:
        calls = self.calls if calls is None else calls

        def called(*args: Any, **kwargs: Any) -> Any:
            calls.append({"function": function.__name__, "args": args, **kwargs})
            return function(*args, **kwargs)

        return called


def world_of(*steps: Step, **settings: Any) -> World:
    case = Case(name="of-this-test", steps=steps, **{**LATENT, **settings})
    return make_world(case, CANDIDATE.platform, "cpu")


def run(world: World, backend: FA3MLABackend, step: Step, **more: Any) -> list[torch.Tensor]:
    """The output of each layer."""
    made = prepare_step(world, step)
    backend.init_forward_metadata(made.batch)
    return [
        backend.forward(
            given.q,
            given.k,
            None,
            given.layer,
            made.batch,
            made.save_kv_cache,
            q_rope=given.q_rope,
            k_rope=given.k_rope,
            **more,
        )
        for given in made.inputs
    ]


def expected(world: World, given, batch) -> tuple[torch.Tensor, torch.Tensor]:
    context = world.context
    return reference.attention(
        given.q,
        given.layer,
        batch,
        context.req_to_token_pool.req_to_token,
        context.token_to_kv_pool,
        q_rope=given.q_rope,
    )


def test_the_cache_is_two_views_of_the_pool():
    step = decode(40, 7)
    spy, world = Spy(), world_of(step, page_size=16)
    run(world, FA3MLABackend(world.context, {}, spy.kernels), step)
    rows = world.context.token_to_kv_pool.get_key_buffer(1)
    q, k_cache, v_cache = spy.calls[0]["args"]
    assert (q.shape[-1], spy.calls[0]["qv"].shape[-1]) == (64, 512)
    assert k_cache.shape == (len(rows) // 16, 16, 1, 64)
    assert v_cache.shape == (len(rows) // 16, 16, 1, 512)
    assert v_cache.data_ptr() == rows.data_ptr()
    assert k_cache.data_ptr() == rows.data_ptr() + 512 * rows.itemsize
    assert k_cache.stride() == v_cache.stride() == (16 * 576, 576, 576, 1)


@pytest.mark.parametrize("step", [decode(40, 7), extend((16, 9), (0, 4)), verify(3, 9, 20)])
def test_a_paged_step_is_one_call_a_layer(step):
    """`flash_attn_varlen_func` takes a page table and ignores it: it is for the call's own keys."""
    spy, world = Spy(), world_of(step, spec_topk=1)
    run(world, FA3MLABackend(world.context, {}, spy.kernels), step)
    assert [call["function"] for call in spy.calls] == ["flash_attn_with_kvcache"] * 2
    assert all(call["causal"] for call in spy.calls)


@pytest.mark.parametrize(
    ("options", "deterministic", "splits"), [({}, False, 0), ({"num_splits": 4}, False, 4)]
)
def test_splits(options, deterministic, splits):
    spy, world = Spy(), world_of(decode(40), deterministic=deterministic)
    run(world, FA3MLABackend(world.context, options, spy.kernels), decode(40))
    assert spy.calls[0]["num_splits"] == splits


def test_deterministic_keys_are_not_split():
    spy, world = Spy(), world_of(decode(40), deterministic=True)
    run(world, FA3MLABackend(world.context, {"num_splits": 4}, spy.kernels), decode(40))
    assert spy.calls[0]["num_splits"] == 1


def test_rows_that_the_kernels_cannot_load_or_store():
    step = extend((0, 9), (3, 4))
    world = world_of(step, kv_in_pool=True)
    backend, prepared = FA3MLABackend(world.context, {}, EMULATED), prepare_step(world, step)
    backend.init_forward_metadata(prepared.batch)
    given = prepared.inputs[0]

    def odd(rows: torch.Tensor) -> torch.Tensor:
        width = rows[0].numel()
        return rows.new_empty(len(rows), width + 3)[:, 1 : width + 1].view(rows.shape).copy_(rows)

    def forward(q, q_rope, out=None):
        return backend.forward(q, None, None, given.layer, prepared.batch, q_rope=q_rope, out=out)

    plain = forward(given.q, given.q_rope)
    out = odd(torch.full_like(plain, 7))
    assert forward(odd(given.q), odd(given.q_rope), out) is out
    assert torch.equal(out, plain)


def drafted(world: World, **spec: Any):
    """A step of two requests with the drafts of `TREE`."""
    made = prepare_step(world, verify(6, 9, 0))
    parents = torch.tensor([TREE, TREE])
    mask = tree_mask(parents, made.batch.seq_lens)
    info = replace(made.batch.spec_info, **{"custom_mask": mask, **spec})
    return replace(made, batch=replace(made.batch, spec_info=info))


def test_the_keys_of_each_draft():
    world = world_of(verify(6, 9, 0), spec_topk=4)
    batch = drafted(world).batch
    visible = visible_drafts(batch)
    group = KeyGroup.of(world.context.layers[0], world.context)
    table, lens = draft_keys(batch, visible, group, world.context)
    seen = [[0], [0, 1], [0, 2], [0, 3], [0, 1, 4], [0, 1, 5]]
    assert lens.tolist() == [len(drafts) for drafts in seen] * 2
    slots = batch.out_cache_loc.view(2, 6)
    for row, (request, drafts) in enumerate((r, drafts) for r in (0, 1) for drafts in seen):
        padding = [0] * (6 - len(drafts))
        assert table[row].tolist() == slots[request, drafts].tolist() + padding


@pytest.mark.parametrize("spec", [{}, {"mask_indptr": None}])
def test_a_tree_is_two_calls_and_a_merge(spec):
    world = world_of(verify(6, 9, 0), spec_topk=4)
    spy, made = Spy(), drafted(world, **spec)
    backend = FA3MLABackend(world.context, {}, spy.kernels)
    backend.init_forward_metadata(made.batch)
    given = made.inputs[0]
    lse = torch.zeros(given.q.shape[:2])
    out = backend.forward(
        given.q,
        given.k,
        None,
        given.layer,
        made.batch,
        q_rope=given.q_rope,
        k_rope=given.k_rope,
        lse=lse,
    )
    prefix, drafts = spy.calls
    assert prefix["cache_seqlens"].tolist() == [9, 0]
    assert drafts["cache_seqlens"].tolist() == [1, 2, 2, 2, 3, 3] * 2
    assert not prefix.get("causal", False)
    assert not drafts.get("causal", False)
    right, right_lse = expected(world, given, made.batch)
    torch.testing.assert_close(out.double(), right, atol=8e-3, rtol=1.6e-2)
    torch.testing.assert_close(lse.double(), right_lse, atol=1e-3, rtol=1e-3)


def test_a_tree_over_pages_of_many_tokens():
    """Its own keys are named by slots, whatever the pool's pages are."""
    world = world_of(verify(6, 9, 0), spec_topk=4, page_size=16)
    made, backend = drafted(world), FA3MLABackend(world.context, {}, EMULATED)
    backend.init_forward_metadata(made.batch)
    given = made.inputs[0]
    out = backend.forward(
        given.q,
        given.k,
        None,
        given.layer,
        made.batch,
        q_rope=given.q_rope,
        k_rope=given.k_rope,
    )
    right, _ = expected(world, given, made.batch)
    torch.testing.assert_close(out.double(), right, atol=8e-3, rtol=1.6e-2)


def hiding(request: int, draft: int, key: int) -> torch.Tensor:
    """The mask of `drafted`, without one value."""
    mask = tree_mask(torch.tensor([TREE, TREE]), torch.tensor([9, 0]))
    mask[(6 * 15 if request else 0) + draft * (6 if request else 15) + key] = False
    return mask


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (hiding(0, 4, 3), "cached tokens hidden from drafts in request 0"),
        (hiding(1, 2, 2), "a draft token hidden from itself in request 1"),
        (hiding(1, 2, 2)[:-1], "35 values, not 36, in request 1"),
    ],
)
def test_masks_that_are_no_trees_are_refused_in_debug_mode(mask, message):
    world = world_of(verify(6, 9, 0), spec_topk=4)
    backend = FA3MLABackend(replace(world.context, debug=True), {}, EMULATED)
    backend.init_forward_metadata(drafted(world).batch)
    with pytest.raises(InvalidInput, match=message):
        backend.init_forward_metadata(drafted(world, custom_mask=mask).batch)


def test_a_mask_belongs_to_drafts():
    world = world_of(extend((0, 3)))
    backend = FA3MLABackend(world.context, {}, EMULATED)
    spec = drafted(world_of(verify(6, 9, 0), spec_topk=4)).batch.spec_info
    batch = replace(prepare_step(world, extend((0, 3))).batch, spec_info=spec)
    with pytest.raises(InvalidInput, match="custom_mask"):
        backend.init_forward_metadata(batch)


def test_graphs_of_trees_live_side_by_side():
    """The second is of more requests with more drafts, and needs larger buffers."""
    small, large = verify(3, 9, 4), verify(5, 3, 9, 21)
    world = world_of(small, large, spec_topk=4, kv_in_pool=True)
    backend, graphs = FA3MLABackend(world.context, {}, EMULATED), RecordingGraphs()

    def capture(step: Step):
        batch = (prepared := prepare_step(world, step)).batch
        backend.init_cuda_graph_state(batch.batch_size, batch.num_tokens)
        backend.init_forward_metadata_out_graph(batch, in_capture=True)
        given = prepared.inputs[0]
        with torch.no_grad():
            return graphs.capture(
                GraphStep(
                    prepare=lambda: backend.init_forward_metadata_in_graph(batch),
                    forward=lambda: backend.forward(
                        given.q, None, None, given.layer, batch, q_rope=given.q_rope
                    ),
                )
            ), prepared

    graph, kept = capture(small)
    graph.replay()
    before = graph.outputs.clone()
    rows = world.context.token_to_kv_pool.get_key_buffer(1)
    table = world.context.req_to_token_pool.req_to_token
    held = [tensor.clone() for tensor in (rows, table)]
    other, kept_too = capture(large)
    other.replay()
    for tensor, copy in zip((rows, table), held, strict=True):
        tensor.copy_(copy)
    graph.outputs.zero_()
    graph.replay()
    assert torch.equal(graph.outputs, before)
    assert (kept.batch.batch_size, kept_too.batch.batch_size) == (2, 3)


def test_a_captured_table_is_as_wide_as_the_longest_context():
    """The library splits keys by the table's width, and a graph keeps what it chose."""
    spy, world = Spy(), world_of(decode(5, 6), page_size=16)
    backend = FA3MLABackend(world.context, {}, spy.kernels)
    backend.init_cuda_graph_state(2, 2)
    made = prepare_step(world, decode(5, 6))
    backend.init_forward_metadata_out_graph(made.batch, in_capture=True)
    backend.init_forward_metadata_in_graph(made.batch)
    given = made.inputs[0]
    backend.forward(given.q, None, None, given.layer, made.batch, q_rope=given.q_rope)
    assert spy.calls[0]["page_table"].shape == (2, 256 // 16)


@pytest.mark.parametrize(("max_bs", "tokens"), [(0, 0), (1, 6), (2, 6)])
def test_a_captured_tree_without_room_is_refused(max_bs, tokens):
    world = world_of(verify(6, 9, 0), spec_topk=4)
    backend = FA3MLABackend(world.context, {}, EMULATED)
    if max_bs:
        backend.init_cuda_graph_state(max_bs, tokens)
    with pytest.raises(GraphUnsupported, match="init_cuda_graph_state"):
        backend.init_forward_metadata_out_graph(drafted(world).batch, in_capture=True)


@pytest.mark.parametrize(
    ("changes", "came"),
    [
        ({"sliding_window_size": 8}, "sliding_window_size 8"),
        ({"attention_chunk_size": 16}, "attention_chunk_size 16"),
        ({"logit_cap": 2.0}, "logit_cap 2.0"),
        ({"sinks": torch.zeros(4)}, "sinks"),
        ({"is_causal": False}, "is_causal False"),
        ({"qk_head_dim": 288, "v_head_dim": 256}, r"256 \+ 32 dims"),
        ({"kind": "mha", "qk_head_dim": 128, "v_head_dim": 128}, "mha"),
    ],
)
def test_layers_that_are_refused(changes, came):
    world = world_of(decode(3))
    layer = replace(world.context.layers[0], **changes)
    with pytest.raises(InvalidInput, match=came):
        FA3MLABackend(replace(world.context, layers=(layer,)), {}, EMULATED)


@pytest.mark.parametrize("kv_dtype", ["float16", "fp8_e4m3", "fp8_e5m2"])
def test_pools_that_are_refused(kv_dtype):
    world = world_of(decode(3), kv_dtype=kv_dtype)
    with pytest.raises(InvalidInput, match="token_to_kv_pool: expected bfloat16"):
        FA3MLABackend(world.context, {}, EMULATED)


def test_layers_without_a_place_in_the_pool():
    step = extend((0, 9), (0, 4))
    world = world_of(step, save_kv_cache=False)
    elsewhere = MLATokenToKVPool(
        size=16,
        page_size=1,
        dtype=torch.bfloat16,
        layer_ids=[99],
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        device="cpu",
    )
    backend = FA3MLABackend(replace(world.context, token_to_kv_pool=elsewhere), {}, EMULATED)
    given = prepare_step(world, step)
    run(world, backend, step)
    one = given.inputs[0]
    with pytest.raises(AttnmuxError, match="layer 1 is not in the KV pool"):
        backend.forward(one.q, None, None, one.layer, given.batch, q_rope=one.q_rope)


def test_latents_of_another_dtype_are_refused():
    step = extend((0, 3))
    world = world_of(step, save_kv_cache=False)
    backend, prepared = FA3MLABackend(world.context, {}, EMULATED), prepare_step(world, step)
    backend.init_forward_metadata(prepared.batch)
    given = prepared.inputs[0]
    with pytest.raises(InvalidInput, match=r"k: expected torch\.bfloat16"):
        backend.forward(
            given.q,
            given.k.half(),
            None,
            given.layer,
            prepared.batch,
            save_kv_cache=False,
            q_rope=given.q_rope,
            k_rope=given.k_rope.half(),
        )


@pytest.mark.parametrize("name", ["flash_attn_with_kvcache", "merge_state_v2"])
def test_kernels_that_do_not_run_here(name):
    def fails(*args, **kwargs):
        raise RuntimeError("CUDA error: no kernel image is available\nmore lines")

    world = world_of(decode(3))
    try_kernels(EMULATED, world.context)
    with pytest.raises(BackendFailed, match=r"no kernel image is available$"):
        try_kernels(replace(EMULATED, **{name: fails}), world.context)
