from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from attnmux.core.batch import ForwardMode
from attnmux.core.choosing.platform import Platform
from attnmux.core.errors import AttnmuxError, BackendFailed, GraphUnsupported, InvalidInput
from attnmux.core.graph.devices import GraphStep
from attnmux.emulators.nvidia.flashinfer import trtllm_decode, trtllm_prefill
from attnmux.nvidia.cards.trtllm_mha import TRTLLM_MHA
from attnmux.nvidia.trtllm.trial import try_backend
from attnmux.nvidia.trtllm_mha import Kernels, TRTLLMMHABackend
from attnmux.nvidia.trtllm_mha.masks import chain_mask
from attnmux.testing import (
    AttentionBackendTests,
    Candidate,
    Case,
    World,
    make_world,
    prepare_step,
    run_case,
)
from attnmux.testing.cases import Step, decode, extend, verify
from attnmux.testing.recording import RecordingGraphs

EMULATED = Kernels(
    xqa_batch_decode_with_kv_cache=trtllm_decode.xqa_batch_decode_with_kv_cache,
    trtllm_batch_decode_with_kv_cache=trtllm_decode.trtllm_batch_decode_with_kv_cache,
    trtllm_fmha_v2_prefill=trtllm_prefill.trtllm_fmha_v2_prefill,
    trtllm_batch_context_with_kv_cache=trtllm_prefill.trtllm_batch_context_with_kv_cache,
)
OPTIONS = {"workspace_bytes": 64 << 20}


def candidate(arch: str) -> Candidate:
    return Candidate(
        card=replace(TRTLLM_MHA, status="available", requires=()),
        platform=Platform.parse(f"nvidia:{arch},cuda=13.0"),
        device="cpu",
        options=OPTIONS,
        factory=lambda context, options: TRTLLMMHABackend(context, options, EMULATED),
    )


CANDIDATES = {arch: candidate(arch) for arch in ("sm90", "sm100", "sm120")}


class TestOnHopper(AttentionBackendTests):
    backend = CANDIDATES["sm90"]
    page_sizes = (16,)


class TestOnDatacenterBlackwell(AttentionBackendTests):
    backend = CANDIDATES["sm100"]
    page_sizes = (128,)


class TestOnDesktopBlackwell(AttentionBackendTests):
    backend = CANDIDATES["sm120"]
    page_sizes = (64,)


class Spy:
    """Kernels that note what they are called with."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        noting = {field.name: self._noting(field.name) for field in fields(Kernels)}
        self.kernels = Kernels(**noting)

    def _noting(self, name: str):
        function = getattr(EMULATED, name)

        def called(*args, **kwargs):
            self.calls.append({"function": name, "args": args, **kwargs})
            return function(*args, **kwargs)

        return called


def world_of(*steps: Step, arch: str = "sm90", **case_settings: Any) -> World:
    settings = {"max_context_len": 256, "page_size": 16, "kv_in_pool": True, **case_settings}
    case = Case(name="of-this-test", steps=steps, **settings)
    return make_world(case, CANDIDATES[arch].platform, "cpu")


def backend_of(world: World, kernels: Kernels = EMULATED) -> TRTLLMMHABackend:
    return TRTLLMMHABackend(world.context, OPTIONS, kernels)


def run(world: World, backend: TRTLLMMHABackend, step: Step, **prepared: Any) -> None:
    made = prepare_step(world, step, **prepared)
    backend.init_forward_metadata(made.batch)
    for given in made.inputs:
        backend.forward(given.q, given.k, given.v, given.layer, made.batch)


@pytest.mark.parametrize(
    ("arch", "functions"),
    [
        ("sm90", ["xqa_batch_decode_with_kv_cache", "trtllm_fmha_v2_prefill"]),
        ("sm100", ["trtllm_batch_decode_with_kv_cache", "trtllm_batch_context_with_kv_cache"]),
        ("sm120", ["xqa_batch_decode_with_kv_cache", "trtllm_fmha_v2_prefill"]),
    ],
)
def test_kernels_by_platform(arch, functions):
    spy, steps = Spy(), (decode(5), verify(2, 5), extend((3, 4)))
    world = world_of(*steps, arch=arch, spec_topk=1)
    backend = backend_of(world, spy.kernels)
    for step in steps:
        spy.calls.clear()
        run(world, backend, step)
        called = functions[step.mode is ForwardMode.EXTEND]
        assert {call["function"] for call in spy.calls} == {called}


@pytest.mark.parametrize("arch", CANDIDATES)
@pytest.mark.parametrize("step", [decode(45, 3, 17), extend((0, 9), (20, 5))])
def test_windows_of_nothing_and_of_more_than_all_keys(arch, step):
    windows = (0, 1, 200) if arch != "sm120" or step.mode.is_decode() else (None,)
    case = Case(name="windows", steps=(step,), windows=windows, page_size=16, max_context_len=256)
    outcome = run_case(CANDIDATES[arch], case)
    assert outcome.status == "passed", outcome.message


def test_verify_steps_with_a_window_have_no_kernel_on_hopper():
    case = Case(
        name="w", steps=(verify(2, 9),), windows=(8, None), page_size=16, spec_topk=1,
        max_context_len=256,
    )  # fmt: skip
    assert run_case(CANDIDATES["sm90"], case).status == "refused"
    assert run_case(CANDIDATES["sm100"], case).status == "passed"
    world = world_of(verify(2, 9), spec_topk=1, windows=(8, None))
    batch = prepare_step(world, verify(2, 9)).batch
    with pytest.raises(InvalidInput, match="a window in a verify step"):
        backend_of(world).init_forward_metadata(batch)


@pytest.mark.parametrize("arch", CANDIDATES)
def test_drafts_of_different_numbers(arch):
    step = extend((20, 3), (0, 1), (33, 0), (5, 4), mode=ForwardMode.DRAFT_EXTEND, trailing=2)
    case = Case(name="drafts", steps=(step,), page_size=32, spec_topk=1, max_context_len=256)
    outcome = run_case(CANDIDATES[arch], case)
    assert outcome.status == "passed", outcome.message


@pytest.mark.parametrize("host_lens", [True, False])
@pytest.mark.parametrize("arch", CANDIDATES)
def test_rows_of_no_request_become_zeros(arch, host_lens):
    step = extend((4, 9), (0, 20), trailing=3)
    world = world_of(step, arch=arch)
    made = prepare_step(world, step, host_lens=host_lens)
    backend = backend_of(world)
    backend.init_forward_metadata(made.batch)
    given = made.inputs[0]
    out = torch.full_like(given.q, torch.nan)
    backend.forward(given.q, None, None, given.layer, made.batch, out=out)
    assert out[:29].isfinite().all()
    assert not out[29:].any()


@pytest.mark.parametrize("arch", CANDIDATES)
@pytest.mark.parametrize("step", [decode(9, 30), extend((0, 9), (3, 4))])
def test_rows_that_the_kernels_cannot_load_are_copied(arch, step):
    world = world_of(step, arch=arch)
    backend, made = backend_of(world), prepare_step(world, step)
    backend.init_forward_metadata(made.batch)
    given = made.inputs[0]

    def forward(q, out=None):
        return backend.forward(q, None, None, given.layer, made.batch, out=out)

    expected = forward(given.q)
    width = given.q[0].numel()
    rows = torch.empty(len(given.q), 2 * width + 3, dtype=given.q.dtype)
    for start in (0, 1, 8):
        odd = rows[:, start : start + width].view(given.q.shape)
        assert torch.equal(forward(odd.copy_(given.q)), expected)
    out = torch.full_like(rows, 7)[:, 1 : width + 1].view(given.q.shape)
    assert forward(given.q, out) is out
    assert torch.equal(out, expected)
    out = torch.full_like(given.q, 7)
    assert forward(given.q, out) is out
    assert torch.equal(out, expected)


@pytest.mark.parametrize(
    ("settings", "given"),
    [
        ({}, [0, 7]),
        ({"sinks": True}, [0, 7]),
        ({"kv_dtype": "fp8_e4m3"}, [1, 7]),
        ({"arch": "sm100"}, [1, 7]),
    ],
)
def test_lengths_are_the_batchs_own_where_no_request_is_empty(settings, given):
    """Where one is, kernels that give it no 0 are given a key of it."""
    spy, world = Spy(), world_of(decode(40, 7), **settings)
    backend = backend_of(world, spy.kernels)
    made = prepare_step(world, decode(40, 7), host_lens=True)
    backend.init_forward_metadata(made.batch)
    first = made.inputs[0]
    backend.forward(first.q, None, None, first.layer, made.batch)
    assert spy.calls[0]["args"][4] is made.batch.seq_lens
    run(world, backend, decode(0, 7), host_lens=True)
    assert spy.calls[-1]["args"][4].tolist() == given


@pytest.mark.parametrize("sinks", [False, True])
def test_requests_without_keys_cost_xqa_no_launch(sinks):
    """A sink answers for them: a layer's own, or one below every logit."""
    spy, world = Spy(), world_of(decode(40, 7), sinks=sinks)
    backend = backend_of(world, spy.kernels)
    backend.init_cuda_graph_state(2, 2)
    made = prepare_step(world, decode(40, 7))
    backend.init_forward_metadata_out_graph(made.batch, in_capture=True)
    backend.init_forward_metadata_in_graph(made.batch)
    for given in made.inputs:
        backend.forward(given.q, None, None, given.layer, made.batch)
    for call, given in zip(spy.calls, made.inputs, strict=True):
        assert call["args"][4] is made.batch.seq_lens
        assert (call["sinks"] is given.layer.sinks) == sinks
        assert sinks or call["sinks"].tolist() == [-9e4] * given.layer.tp_q_head_num


@pytest.mark.parametrize("arch", CANDIDATES)
def test_heads_of_a_group_that_xqa_compiles_for(arch):
    for heads in (32, 34):
        world = world_of(decode(3), arch=arch, num_q_heads=heads, num_kv_heads=2)
        if arch == "sm100" or heads == 32:
            run(world, backend_of(world), decode(3))
        else:
            with pytest.raises(InvalidInput, match="17 query heads of one KV head"):
                backend_of(world)


@pytest.mark.parametrize(
    ("group", "drafts", "is_served"), [(3, 10, True), (3, 11, False), (8, 5, True), (16, 3, True)]
)
def test_sinks_of_drafts_are_those_of_their_heads(group, drafts, is_served):
    step = verify(drafts, 9, 20)
    shape = {"num_q_heads": 2 * group, "num_kv_heads": 2, "sinks": True, "spec_topk": 1}
    case = Case(name="sinks", steps=(step,), page_size=16, max_context_len=256, **shape)
    outcome = run_case(CANDIDATES["sm90"], case)
    assert outcome.status == ("refused" if 32 % group else "passed"), outcome.message
    world = world_of(step, **shape)
    backend, made = backend_of(world), prepare_step(world, step)
    if is_served:
        backend.init_forward_metadata(made.batch)
    else:
        with pytest.raises(InvalidInput, match=f"groups of {group} heads"):
            backend.init_forward_metadata(made.batch)


def test_the_decode_kernels_memory_is_their_own():
    """fmha_v2 leaves a count where they want zeros."""
    spy, steps = Spy(), (extend((0, 30), (5, 3)), decode(31, 9))
    world = world_of(*steps)
    backend = backend_of(world, spy.kernels)
    for step in steps:
        run(world, backend, step)
    by_function = {call["function"]: call["args"][2] for call in spy.calls}
    counts, counters = by_function.values()
    places = {memory.untyped_storage().data_ptr() for memory in (counts, counters)}
    assert len(places) == 2
    assert counts[:4].any()
    assert not counters.any()


def test_staged_keys_are_those_of_the_step_alone():
    spy, step = Spy(), extend((16, 5), (0, 3))
    world = world_of(step, windows=(None, 8))
    run(world, backend_of(world, spy.kernels), step, host_lens=True)
    first, second = (call["args"][0][1] for call in spy.calls)
    assert first.shape == (3, 2, 16, 2, 128)
    assert first.data_ptr() == second.data_ptr()
    assert spy.calls[0]["block_tables"].tolist() == [[0, 1], [2, 2]]
    assert [call["mask_mode"] for call in spy.calls] == ["causal", "sliding_window"]


def test_queries_beyond_the_range_of_fp8_saturate():
    for arch in ("sm90", "sm100"):
        world = world_of(decode(5), kv_dtype="fp8_e4m3", arch=arch)
        backend, made = backend_of(world), prepare_step(world, decode(5))
        backend.init_forward_metadata(made.batch)
        given = made.inputs[0]
        assert backend.forward(given.q * 1e4, None, None, given.layer, made.batch).isfinite().all()


@pytest.mark.parametrize("drafts", [2, 16, 17, 33])
def test_masks_of_chains(drafts):
    mask = chain_mask(2, drafts, torch.device("cpu"))
    words = -(-drafts // 32) * 2
    assert (mask.dtype, mask.shape) == (torch.uint16, (2, drafts, words))
    assert mask.is_contiguous()
    bits = torch.tensor(mask.tolist()).unsqueeze(-1) >> torch.arange(16) & 1
    seen = torch.zeros(drafts, 16 * words, dtype=torch.int64)
    seen[:, :drafts] = torch.ones(drafts, drafts, dtype=torch.int64).tril()
    assert torch.equal(bits.flatten(2), seen.expand(2, -1, -1))


@pytest.mark.parametrize("arch", CANDIDATES)
def test_graphs_of_several_modes_live_side_by_side(arch):
    small, large = decode(40, 7), verify(3, 9, 21, 30, 5)
    world = world_of(small, large, spec_topk=1, arch=arch)
    backend, graphs = backend_of(world), RecordingGraphs()
    kept = []

    def capture(step: Step):
        made = prepare_step(world, step)
        batch, given = made.batch, made.inputs[0]
        backend.init_cuda_graph_state(batch.batch_size, batch.num_tokens)
        backend.init_forward_metadata_out_graph(batch, in_capture=True)
        with torch.no_grad():
            graph = graphs.capture(
                GraphStep(
                    prepare=lambda: backend.init_forward_metadata_in_graph(batch),
                    forward=lambda: backend.forward(given.q, None, None, given.layer, batch),
                )
            )
        kept.append(made)
        return graph

    pool, table = world.context.token_to_kv_pool, world.context.req_to_token_pool.req_to_token
    graph = capture(small)
    graph.replay()
    expected, rows = graph.outputs.clone(), table.clone()
    buffers = [buffer.clone() for buffer in pool.get_kv_buffer(1)]
    other = capture(large)
    other.replay()
    table.copy_(rows)
    for buffer, before in zip(pool.get_kv_buffer(1), buffers, strict=True):
        buffer.copy_(before)
    graph.outputs.zero_()
    graph.replay()
    assert torch.equal(graph.outputs, expected)


@pytest.mark.parametrize("max_batch_size", [0, 1])
def test_a_capture_without_room_is_refused(max_batch_size):
    world = world_of(decode(5, 6))
    backend = backend_of(world)
    if max_batch_size:
        backend.init_cuda_graph_state(max_batch_size, max_batch_size)
    with pytest.raises(GraphUnsupported, match="init_cuda_graph_state"):
        backend.init_forward_metadata_out_graph(
            prepare_step(world, decode(5, 6)).batch, in_capture=True
        )


@pytest.mark.parametrize("arch", CANDIDATES)
def test_prefill_is_not_captured(arch):
    world = world_of(extend((0, 3)), arch=arch)
    backend = backend_of(world)
    backend.init_cuda_graph_state(8, 8)
    batch = prepare_step(world, extend((0, 3))).batch
    with pytest.raises(GraphUnsupported, match="EXTEND runs without a graph"):
        backend.init_forward_metadata_out_graph(batch, in_capture=True)


@pytest.mark.parametrize(
    ("settings", "argument"),
    [
        ({"kv_dtype": "float16"}, "token_to_kv_pool"),
        ({"kv_dtype": "fp8_e5m2"}, "token_to_kv_pool"),
        ({"logit_cap": 2.0}, "layer 1"),
        ({"attention_chunk": 16}, "layer 1"),
        ({"head_dim": 192}, "layer 1"),
        (
            {"kind": "mla", "num_kv_heads": 1, "kv_lora_rank": 64, "qk_rope_head_dim": 16},
            "layer 1",
        ),
    ],
)
def test_pools_and_layers_that_are_refused(settings, argument):
    world = world_of(decode(3), **settings)
    with pytest.raises(InvalidInput) as refusal:
        backend_of(world)
    assert refusal.value.argument == argument


def test_a_platform_without_kernels():
    world = make_world(
        Case(name="old", steps=(decode(3),), page_size=16, max_context_len=256),
        Platform.parse("nvidia:sm80,cuda=13.0"),
        "cpu",
    )
    with pytest.raises(InvalidInput, match="sm80"):
        backend_of(world)


def test_a_workspace_that_is_too_small():
    world = world_of(decode(3))
    with pytest.raises(InvalidInput, match=r"workspace_bytes: expected \d+ or more.* too few"):
        TRTLLMMHABackend(world.context, {"workspace_bytes": 9 << 20}, EMULATED)


def test_many_drafts_take_more_workspace():
    step = verify(64, 5)
    world = world_of(step, spec_topk=1, num_q_heads=32)
    assert world.context.request.spec_draft_tokens == 64
    least = (8 << 20) + 256 * 64 * 16 * (128 * 4 + 8)
    for workspace_bytes in (least - 1, least):
        options = {"workspace_bytes": workspace_bytes}
        if workspace_bytes < least:
            with pytest.raises(InvalidInput, match=f"expected {least} or more"):
                TRTLLMMHABackend(world.context, options, EMULATED)
        else:
            run(world, TRTLLMMHABackend(world.context, options, EMULATED), step)


def test_the_usual_workspace():
    spy, world = Spy(), world_of(decode(3))
    backend = TRTLLMMHABackend(world.context, {"workspace_bytes": 0}, spy.kernels)
    run(world, backend, decode(3))
    assert spy.calls[0]["args"][2].numel() == 512 << 20


def test_calls_that_are_refused():
    step = extend((0, 3))
    world = world_of(step)
    backend, made = backend_of(world), prepare_step(world, step)
    given = made.inputs[0]
    with pytest.raises(AttnmuxError, match="init_forward_metadata"):
        backend.forward(given.q, None, None, given.layer, made.batch)
    backend.init_forward_metadata(made.batch)
    with pytest.raises(InvalidInput, match="lse"):
        backend.forward(
            given.q, None, None, given.layer, made.batch, lse=torch.empty(given.q.shape[:2])
        )
    k = torch.zeros(3, 2, 128, dtype=given.q.dtype)
    with pytest.raises(InvalidInput, match="save_kv_cache"):
        backend.forward(given.q, k, k, given.layer, made.batch, save_kv_cache=False)


@pytest.mark.parametrize("settings", [{"kv_dtype": "fp8_e4m3"}, {"dtype": "float16"}])
def test_prefill_over_anything_but_bfloat16_is_refused_on_hopper(settings):
    step = extend((0, 3))
    world = world_of(step, **settings)
    with pytest.raises(InvalidInput, match="fmha_v2"):
        backend_of(world).init_forward_metadata(prepare_step(world, step).batch)


def test_trees_are_refused():
    step = verify(3, 5)
    world = world_of(step, spec_topk=4)
    with pytest.raises(InvalidInput, match="custom_mask"):
        backend_of(world).init_forward_metadata(prepare_step(world, step).batch)


def test_nothing_is_prepared_for_an_idle_step():
    step = extend(mode=ForwardMode.IDLE)
    world = world_of(step)
    run(world, backend_of(world), step)


def test_the_trial_launches_every_kernel_that_is_needed():
    steps = decode(3), verify(3, 5), extend((0, 3))
    spy, world = Spy(), world_of(*steps, spec_topk=1)
    try_backend("nvidia/trtllm_mha", backend_of(world, spy.kernels))
    tried = {(call["function"], call.get("q_len_per_req")) for call in spy.calls}
    assert tried == {
        ("xqa_batch_decode_with_kv_cache", 1),
        ("xqa_batch_decode_with_kv_cache", 3),
        ("trtllm_fmha_v2_prefill", None),
    }
    spy, world = Spy(), world_of(decode(3), windows=(None, 8, 21))
    try_backend("nvidia/trtllm_mha", backend_of(world, spy.kernels))
    assert [call["window_left"] for call in spy.calls] == [-1, 8]


def test_the_trial_leaves_out_what_another_backend_serves():
    spy, world = Spy(), world_of(decode(3), extend((0, 3)), kv_dtype="fp8_e4m3")
    try_backend("nvidia/trtllm_mha", backend_of(world, spy.kernels))
    assert {call["function"] for call in spy.calls} == {"xqa_batch_decode_with_kv_cache"}


def test_kernels_that_do_not_run_here():
    def fails(*args, **kwargs):
        raise RuntimeError("Ninja build failed\nmore lines")

    world = world_of(decode(3))
    kernels = replace(EMULATED, xqa_batch_decode_with_kv_cache=fails)
    with pytest.raises(BackendFailed, match=r"nvidia/trtllm_mha .*Ninja build failed; .*nvcc"):
        try_backend("nvidia/trtllm_mha", backend_of(world, kernels))
